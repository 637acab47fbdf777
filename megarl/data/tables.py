"""The rows of a config's data, or of one file, as the checks of quality look at them."""

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.config import Config
from megarl.config_data import DataConfig, SourceConfig
from megarl.data import chat, toy
from megarl.data.columns import Columns, find_columns, first_values, usual_reward
from megarl.data.messages import parse_messages, parse_tools
from megarl.data.overlong import prompt_limit
from megarl.data.quality import Record
from megarl.data.row_errors import short
from megarl.data.sources import read_source
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Table:
    title: str
    name: str  # short, for the table of verdicts
    columns: Columns
    unit: str  # of the prompts' lengths
    prompt_limit: tuple[int, str] | None  # the longest prompt, and what says so
    is_overlong_refused: bool
    is_held_out: bool
    records: list[Record]
    num_rows: int
    errors: list[str]  # of rows that are not among the records


def read_config(config: Config) -> list[Table]:
    """Training data, warm start and held-out data, each source by itself; the toy is written as by a run."""
    if config.toy:
        toy.make(config.toy.folder, config.toy.seed)
    data, algorithm = config.data, config.algorithm
    tokenizer = chat.load_tokenizer(config.model.path, data.chat_template)
    limit = prompt_limit(data, ModelShape.read(config.model.path).max_positions)
    if algorithm.has_pairs:
        columns = Columns(data.prompt_key, responses=(data.chosen_key, data.rejected_key))
    elif algorithm.name == "sft":
        columns = Columns(data.prompt_key, responses=(data.response_key,))
    else:
        columns = Columns(data.prompt_key, data.answer_key)
    given = [("data.train", source, columns) for source in data.train]
    if config.warm_start.data is not None:
        source = SourceConfig(path=config.warm_start.data)
        given.append(("warm_start.data", source, Columns(data.prompt_key, responses=(data.response_key,))))
    given += [("data.validation", source, columns) for source in data.validation or []]
    tables = []
    for key, source, columns in given:
        columns = replace(columns, reward=usual_reward(first_values(source)[0]))
        tables.append(_read(key, source, columns, data, tokenizer, limit))
    return tables


def read_file(
    path: str, keys: dict[str, str | None], tokenizer_folder: str | None, max_prompt_tokens: int | None
) -> Table:
    """One file, with the columns of `find_columns`; without tokenizer prompts are counted in characters."""
    source = SourceConfig(path=path)
    columns = find_columns(source, keys)
    data = DataConfig(train=path, prompt_key=columns.prompt)
    tokenizer = None
    if tokenizer_folder:
        with chat.blamed_on("--tokenizer"):
            tokenizer = chat.load_tokenizer(tokenizer_folder)
    limit = None if max_prompt_tokens is None else (max_prompt_tokens, f"{max_prompt_tokens} tokens")
    return _read("", source, columns, data, tokenizer, limit)


def _read(
    key: str,
    source: SourceConfig,
    columns: Columns,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    limit: tuple[int, str] | None,
) -> Table:
    errors: list[str] = []
    records, num_rows = [], 0
    for place, row in read_source(source, errors):
        num_rows += 1
        record = _record(row, place, columns, data, tokenizer, errors)
        if record is not None:
            records.append(record)
    return Table(
        title=f"{key}: {source}" if key else str(source),
        name=str(source),
        columns=columns,
        unit="characters" if tokenizer is None else "tokens",
        prompt_limit=limit,
        is_overlong_refused=data.overlong == "refuse" or bool(columns.responses),
        is_held_out=key == "data.validation",
        records=records,
        num_rows=num_rows,
        errors=errors,
    )


def _record(
    row: dict,
    place: str,
    columns: Columns,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    errors: list[str],
) -> Record | None:
    """None where something was added to `errors`. An answer or a response that is not there is empty."""
    num_errors = len(errors)
    messages = parse_messages(row, place, data, errors)
    tools = parse_tools(row, place, data.tools_key, errors)
    answer = None if columns.answer is None else _text(row, columns.answer, place, errors)
    responses = tuple(_text(row, column, place, errors) for column in columns.responses)
    reward = row.get(columns.reward)
    if reward is not None and not (type(reward) in (int, float) and abs(reward) <= sys.float_info.max):
        errors.append(f"{place}: {columns.reward}: wanted a finite number, given {short(reward)}")
    if len(errors) > num_errors:
        return None
    # What all prompts begin with would make them look alike.
    own = [message["content"] for message in messages if message["content"] != data.system_prompt]
    length = sum(map(len, own))
    if tokenizer is not None:
        try:
            length = len(chat.render(tokenizer, messages, tools))
        except ConfigError as error:
            errors.append(f"{place}: {columns.prompt}: {error}")
            return None
    return Record(place, "\n".join(own), length, answer, responses, reward)


def _text(row: dict, column: str, place: str, errors: list[str]) -> str:
    """An answer or a response, which may be a list of one message."""
    value = row.get(column, "")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        value = value[0].get("content")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        errors.append(f"{place}: {column}: wanted a text, a number or a message, given {short(row[column])}")
        return ""
    return str(value)
