"""Rows with responses to samples for supervised training, one or a pair per row."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config_data import DataConfig, SourceConfig
from megarl.data.dataset import parse_prompt
from megarl.data.row_errors import has_column, raise_if_any, short
from megarl.data.sources import listed, read_source, sources_of
from megarl.errors import ConfigError
from megarl.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_responses(
    sources: str | Path | list[SourceConfig],
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int,
    keys: tuple[str, ...],
) -> list[Sample]:
    """For each row a sample per key of `data_config` ("response_key", or "chosen_key" and "rejected_key"), in the order
    of a file, or of sources one after another; group_id is the row's place, index the sample's.

    A response is a text, or a list of one assistant message, that the end-of-turn token is appended to; the loss covers
    both. Raises ConfigError naming every wrong row (file:line and column), two equal responses of a row among them, or
    where a prompt exceeds max_prompt_tokens or a whole sequence `context_length`: nothing is dropped here.
    """
    errors: list[str] = []
    samples: list[Sample] = []
    columns = tuple(getattr(data_config, key) for key in keys)
    sources = sources_of(sources)
    rows = ((index, *found) for index, source in enumerate(sources) for found in read_source(source, errors))
    for source_index, place, row in rows:
        prompt = parse_prompt(row, place, data_config, tokenizer, None, errors, columns, source_index)
        responses = [_parse_response(row, place, key, data_config, tokenizer, errors) for key in keys]
        if prompt is None or None in responses:
            continue
        if len(set(responses)) < len(responses):
            errors.append(f"{place}: {', '.join(columns)}: the same text")
        if len(prompt.token_ids) > data_config.max_prompt_tokens:
            given, limit = len(prompt.token_ids), data_config.max_prompt_tokens
            errors.append(f"{place}: {data_config.prompt_key}: {given} tokens > data.max_prompt_tokens={limit}")
        for column, response in zip(columns, responses):
            response_ids = tokenizer.encode(response, add_special_tokens=False) + [tokenizer.eos_token_id]
            if (num_tokens := len(prompt.token_ids) + len(response_ids)) > context_length:
                too_long = f"{num_tokens} tokens with the prompt > {context_length}, the room in the model's context"
                errors.append(f"{place}: {column}: {too_long}")
            index = len(samples)
            group_id = index // len(keys)
            samples.append(
                Sample.from_response(prompt, response_ids, group_id=group_id, index=index, response_text=response)
            )
    raise_if_any(errors, listed(sources))
    for index, source in enumerate(sources):
        if all(sample.prompt.source_index != index for sample in samples):
            raise ConfigError(f"{source}: no rows")
    return samples


def with_score_token(sample: Sample) -> Sample:
    """The sample with one token more, whose place holds the score of the whole sequence, and none trained but that one.

    An engine's value at t is that of the tokens before t, so the place of the last token cannot hold it. What is added
    is the last token once more; its id is of no consequence, as a causal mask hides it from all tokens before. Without
    the other per-token fields, which speak of the sequence as it was.
    """
    token_ids = torch.cat([sample.token_ids, sample.token_ids[-1:]])
    return Sample(
        prompt=sample.prompt,
        group_id=sample.group_id,
        index=sample.index,
        prompt_length=sample.prompt_length,
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) == len(token_ids) - 1,
        response_text=sample.response_text,
        status=sample.status,
        policy_version=sample.policy_version,
    )


def _parse_response(
    row: dict, place: str, key: str, data_config: DataConfig, tokenizer: "PreTrainedTokenizerBase", errors: list[str]
) -> str | None:
    """The text of a response; None where something was added to `errors`."""
    column = getattr(data_config, key)
    if not has_column(row, place, column, f"data.{key}", errors):
        return None
    value = row[column]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        is_message = set(value[0]) == {"role", "content"} and value[0]["role"] == "assistant"
        value = value[0]["content"] if is_message else None
    if not isinstance(value, str) or not value.strip():
        wanted = 'a non-empty string or a list of one assistant message {"role", "content"}'
        errors.append(f"{place}: {column}: wanted {wanted}, given {short(row[column])}")
        return None
    if tokenizer.eos_token in value:
        errors.append(f"{place}: {column}: contains {tokenizer.eos_token}, which is appended anyway: remove it")
        return None
    if tokenizer.bos_token and tokenizer.bos_token in value:
        errors.append(f"{place}: {column}: contains {tokenizer.bos_token}, the tokenizer's BOS: remove it")
        return None
    return value
