"""Rows to prompts."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_data import DataConfig, SourceConfig
from megarl.data import chat
from megarl.data.messages import parse_messages, parse_tools
from megarl.data.overlong import fit_prompts
from megarl.data.row_errors import has_column, raise_if_any, short
from megarl.data.sources import listed, read_source, sources_of
from megarl.errors import ConfigError
from megarl.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_prompts(
    sources: str | Path | list[SourceConfig],
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int | None = None,
) -> list[Prompt]:
    """The prompts of a file, or of sources one after another, in their order.

    `data_config.prompt_key` names a column with the user's text or with a list of messages {"role", "content"}, whose
    last one is the user's or a tool's; `tools_key` one with tools for the chat template. The other columns, and as
    `source` the place of the row (see read_source), become metadata; a row's own `source` is there as `source_column`.
    Prompts longer than max_prompt_tokens, or that leave no room for one new token in `context_length`, are treated as
    `overlong` says. Lengths are those of the templated token ids.

    Raises ConfigError naming every wrong row (file:line and key), or where a source has no prompt, or none is left.
    """
    errors: list[str] = []
    sources = sources_of(sources)
    parsed: list[list[Prompt]] = []
    for index, source in enumerate(sources):
        rows = (
            parse_prompt(row, place, data_config, tokenizer, data_config.answer_key, errors, source_index=index)
            for place, row in read_source(source, errors)
        )
        parsed.append([prompt for prompt in rows if prompt is not None])
    raise_if_any(errors, listed(sources))
    prompts = []
    for source, its_prompts in zip(sources, parsed):
        if not its_prompts:
            raise ConfigError(f"{source}: no rows")
        prompts += fit_prompts(its_prompts, source, data_config, tokenizer, context_length)
    return prompts


def parse_prompt(
    row: dict,
    place: str,
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    answer_key: str | None,
    errors: list[str],
    response_keys: tuple[str, ...] = (),
    source_index: int = 0,
) -> Prompt | None:
    """The prompt of one row, the columns that others read left out of its metadata; None where something was added to
    `errors`."""
    num_errors = len(errors)
    messages = parse_messages(row, place, data_config, errors)
    tools = parse_tools(row, place, data_config.tools_key, errors)
    answer = None if answer_key is None else _parse_answer(row, place, answer_key, errors)
    if len(errors) > num_errors:
        return None
    try:
        token_ids = chat.render(tokenizer, messages, tools)
    except ConfigError as error:
        errors.append(f"{place}: {data_config.prompt_key}: {error}")
        return None
    read = (data_config.prompt_key, data_config.tools_key, answer_key, *response_keys)
    metadata = {key: value for key, value in row.items() if key not in read}
    if "source" in metadata:
        metadata["source_column"] = metadata["source"]
    metadata["source"] = place
    return Prompt(messages, token_ids, answer, metadata, tools, source_index)


def _parse_answer(row: dict, place: str, key: str, errors: list[str]) -> str | None:
    if not has_column(row, place, key, "data.answer_key; null: no answers", errors):
        return None
    value = row[key]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        errors.append(f"{place}: {key}: wanted a non-empty string or a finite number, given {short(value)}")
        return None
    return value
