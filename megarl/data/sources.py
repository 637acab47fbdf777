"""Rows of JSONL files, Parquet files and Hugging Face datasets, as plain Python values: one format, wherever they lie.

A key whose value is null is as if it was not there, at any depth: a column of Parquet gives every row the keys of all
rows, so only then do both formats hold the same.
"""

import datetime
import decimal
import json
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config_data import SourceConfig
from megarl.data.row_errors import short
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import RecordBatch, Table

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

    Raises ConfigError for a missing file, and for Parquet that cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    if is_parquet(path):
        yield from _parquet_rows(path, errors)
    else:
        yield from _jsonl_rows(path, errors)


def is_parquet(path: str | Path) -> bool:
    path = Path(path)
    if path.suffix == ".parquet" or not path.is_file():
        return path.suffix == ".parquet"
    with path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _jsonl_rows(path: Path, errors: list[str]) -> Iterator[tuple[int, dict]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8")
                row = json.loads(text)
                if "\\ud" in text.lower():  # an escaped half of a surrogate pair is legal JSON and no text
                    json.dumps(row, ensure_ascii=False).encode("utf-8")
            except ValueError as error:  # not UTF-8, or not JSON
                errors.append(f"{path}:{line}: not JSON: {error}")
                continue
            if isinstance(row, dict):
                yield line, plain(row)
            else:
                errors.append(f"{path}:{line}: wanted a JSON object, given {short(row)}")


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
    from datasets.exceptions import DatasetsError

    try:
        dataset = load_dataset(source.name, source.subset, split=source.split)
    except (DatasetsError, OSError, ValueError) as error:  # which name the subsets or splits that there are
        raise ConfigError(f"{source}: the dataset cannot be loaded: {error}") from error
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
        for row in rows:
            number += 1
            num_errors = len(errors)
            values = _plain_row(row, f"{where}:row {number}", errors)
            if len(errors) == num_errors:
                yield number, values


def _plain_row(row: dict, place: str, errors: list[str]) -> dict:
    values = {}
    for column, value in row.items():
        try:
            values |= plain({column: value})
        except ValueError as error:
            errors.append(f"{place}: {column}: {error}")
    return values


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
