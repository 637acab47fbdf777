"""Rows of JSONL files, Parquet files and Hugging Face datasets, as plain Python values: one format, wherever they lie.

A key whose value is null is as if it was not there, at any depth: a column of Parquet gives every row the keys of all
rows, so only then do both formats hold the same.
"""

import datetime
import decimal
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config_data import SourceConfig
from megarl.data.row_errors import short
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Table

BATCH_ROWS = 1000  # of a Parquet file or a dataset, in memory at a time


def sources_of(given: str | Path | list[SourceConfig]) -> list[SourceConfig]:
    return given if isinstance(given, list) else [SourceConfig(path=str(given))]


def listed(sources: list[SourceConfig]) -> str:
    return ", ".join(map(str, sources))


def weights_of(sources: list[SourceConfig]) -> list[float] | None:
    """Of sources of which all have a weight or none has."""
    weights = [source.weight for source in sources if source.weight is not None]
    return weights or None


def read_source(source: SourceConfig, errors: list[str]) -> Iterator[tuple[str, dict]]:
    """Yield (place, row): FILE:LINE, FILE:row N from 1 of Parquet, or NAME/SUBSET/SPLIT:row N; otherwise as read_rows.

    Raises ConfigError also where the hub cannot be reached, or has no such dataset, subset or split.
    """
    if source.path is None:
        rows, place = _dataset_rows(source, errors), f"{source}:row "
    else:
        rows, place = read_rows(source.path, errors), f"{source.path}:{'row ' * is_parquet(source.path)}"
    for number, row in rows:
        yield f"{place}{number}", row


def read_rows(path: str | Path, errors: list[str]) -> Iterator[tuple[int, dict]]:
    """Yield (number from 1, row) of a file: Parquet by its suffix or its first bytes, else JSONL, whose blank lines are
    no rows. Wrong rows are added to `errors`, which `raise_if_any` reports.

    Raises ConfigError for a file that is not there or cannot be read.
    """
    path = Path(path)
    if not os.path.isfile(path):
        raise ConfigError(f"{path}: no such file")
    if is_parquet(path):
        yield from _parquet_rows(path, errors)
    else:
        yield from _jsonl_rows(path, errors)


def is_parquet(path: str | Path) -> bool:
    path = Path(path)
    if path.suffix == ".parquet" or not os.path.isfile(path):
        return path.suffix == ".parquet"
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _jsonl_rows(path: Path, errors: list[str]) -> Iterator[tuple[int, dict]]:
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    row = plain(parse_json(raw.decode("utf-8")))
                except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or lists within lists without end
                    errors.append(f"{path}:{line}: not JSON: {error}")
                    continue
                if isinstance(row, dict):
                    yield line, row
                else:
                    errors.append(f"{path}:{line}: wanted a JSON object, given {short(row)}")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def parse_json(text: str) -> Any:
    """Raises ValueError also for an object with one key twice, of which json would take the last, and for an escaped
    half of a surrogate pair, which is legal JSON and no text."""
    value = json.loads(text, object_pairs_hook=_object)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise ValueError(f"one key twice among {', '.join(keys)}")
    return dict(pairs)


def _parquet_rows(path: Path, errors: list[str]) -> Iterator[tuple[int, dict]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield from _arrow_rows(file.iter_batches(batch_size=BATCH_ROWS), str(path), errors)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as Parquet: {error}") from error


def _dataset_rows(source: SourceConfig, errors: list[str]) -> Iterator[tuple[int, dict]]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetsError
    from httpx import HTTPError

    try:
        dataset = load_dataset(source.name, source.subset, split=source.split)
    except (DatasetsError, OSError, ValueError, HTTPError) as error:  # which name the subsets or splits that there are
        reason = f"{error}: {error.__cause__}" if isinstance(error, DatasetGenerationError) else error
        raise ConfigError(f"{source}: the dataset cannot be loaded: {reason}") from error
    yield from _arrow_rows(dataset.with_format("arrow").iter(BATCH_ROWS), str(source), errors)


def _arrow_rows(batches: Iterable["RecordBatch | Table"], where: str, errors: list[str]) -> Iterator[tuple[int, dict]]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise ConfigError(f"{where}: two columns of one name among {', '.join(names)}")
        try:
            rows = batch.to_pylist(maps_as_pydicts="strict")
        except KeyError as error:
            raise ConfigError(f"{where}: a map with one key twice: {error}") from error
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date after the year 9999
            raise ConfigError(f"{where}: cannot read rows {number + 1} to {number + len(batch)}: {error}") from error
        json_types = {field.name: field.type for field in batch.schema if "arrow.json" in str(field.type)}
        for row in rows:
            number += 1
            num_errors = len(errors)
            values = _plain_row(row, json_types, f"{where}:row {number}", errors)
            if len(errors) == num_errors:
                yield number, values


def _plain_row(row: dict, json_types: dict[str, "DataType"], place: str, errors: list[str]) -> dict:
    values = {}
    for column, value in row.items():
        try:
            if column in json_types:
                value = _without_json(value, json_types[column])
            values |= plain({column: value})
        except ValueError as error:
            errors.append(f"{place}: {column}: {error}")
    return values


def _without_json(value: Any, arrow_type: "DataType") -> Any:
    """The value with all that is JSON by its type parsed: in this form `datasets` keeps values of different types."""
    import pyarrow

    if isinstance(arrow_type, pyarrow.JsonType):
        return None if value is None else parse_json(value)
    if isinstance(value, list):
        return [_without_json(item, arrow_type.value_type) for item in value]
    if isinstance(value, dict):
        is_map = pyarrow.types.is_map(arrow_type)
        types = {key: arrow_type.item_type if is_map else arrow_type.field(key).type for key in value}
        return {key: _without_json(item, types[key]) for key, item in value.items()}
    return value


def plain(value: Any) -> Any:
    """The value as a JSON file could have held it: keys as text and without those of null, dates and times in ISO 8601,
    decimals with all their digits, bytes as the UTF-8 text that they are. Raises ValueError for anything else."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8")
    raise ValueError(f"a value of type {type(value).__name__}, which JSON does not have")
