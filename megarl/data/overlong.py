"""What becomes of prompts that are too long, by their templated length."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from megarl.config_data import DataConfig, SourceConfig
from megarl.data import chat
from megarl.data.row_errors import raise_if_any
from megarl.errors import ConfigError
from megarl.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def fit_prompts(
    prompts: list[Prompt],
    source: SourceConfig,
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int | None,
) -> list[Prompt]:
    """The prompts of one source, those that are too long as `data_config.overlong` has it, with their count in one log
    line. Raises ConfigError where they are refused, where none is left, or where a text cannot be cut enough."""
    limit, name = prompt_limit(data_config, context_length)
    overlong = [prompt for prompt in prompts if len(prompt.token_ids) > limit]
    if not overlong:
        return prompts
    count = f"{len(overlong)} of {len(prompts)} prompts > {name}"
    column = data_config.prompt_key
    if data_config.overlong == "drop":
        if len(overlong) == len(prompts):
            shortest = min(len(prompt.token_ids) for prompt in prompts)
            raise ConfigError(f"{source}: all {len(prompts)} prompts > {name}; the shortest has {shortest}")
        log.warning("%s: dropped %s", source, count)
        return [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    if data_config.overlong == "refuse":
        rows = [f"{prompt.metadata['source']}: {column}: {len(prompt.token_ids)} tokens" for prompt in overlong]
        raise_if_any(rows, f"{source}, data.overlong: refuse, {count}")
    errors: list[str] = []
    end = "beginning" if data_config.overlong == "truncate_left" else "end"
    fitted = []
    for prompt in prompts:
        try:
            fitted.append(truncate(prompt, limit, end, tokenizer))
        except ConfigError as error:
            errors.append(f"{prompt.metadata['source']}: {column}: {error}")
    raise_if_any(errors, source)
    log.warning("%s: the last message lost its %s in %s", source, end, count)
    return fitted


def prompt_limit(data_config: DataConfig, context_length: int | None) -> tuple[int, str]:
    """(the most tokens of a prompt, what says so): a prompt leaves room for one new token at least."""
    limit = data_config.max_prompt_tokens
    if context_length is not None and context_length - 1 < limit:
        return context_length - 1, f"{context_length - 1} tokens (the model's context less one new token)"
    return limit, f"{limit} tokens (data.max_prompt_tokens)"


def truncate(prompt: Prompt, limit: int, end: str, tokenizer: "PreTrainedTokenizerBase") -> Prompt:
    """The prompt with its last message cut at a token, from its `beginning` or its `end`, until the whole has `limit`
    tokens at most. Raises ConfigError where nothing of the message would be left."""
    *before, last = prompt.messages
    messages, token_ids, num_cut = prompt.messages, prompt.token_ids, 0
    if len(token_ids) <= limit:
        return prompt
    encoded = tokenizer(last["content"], add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    # What is left may be tokenized otherwise, so one cut need not be enough.
    while len(token_ids) > limit:
        num_cut += len(token_ids) - limit
        text = _cut(last["content"], starts, num_cut, end)
        if not text.strip():
            raise ConfigError(f"{len(prompt.token_ids)} tokens, and nothing of the last message fits into {limit}")
        messages = [*before, last | {"content": text}]
        token_ids = chat.render(tokenizer, messages, prompt.tools)
    return replace(prompt, messages=messages, token_ids=token_ids)


def _cut(text: str, starts: list[int], num_cut: int, end: str) -> str:
    """`text`, whose tokens start at these characters, without so many of them."""
    if num_cut >= len(starts):
        return ""
    return text[starts[num_cut] :] if end == "beginning" else text[: starts[len(starts) - num_cut]]
