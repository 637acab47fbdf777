"""Data from one file format to the other: what `read_rows` gives of the new file is what it gave of the old one."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config_data import SourceConfig
from megarl.data.row_errors import raise_if_any, short
from megarl.data.sources import read_source
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from pyarrow import DataType, Schema

BATCH_ROWS = 4096  # in memory at a time, and of a row group
KINDS = {bool: "bool", int: "int", float: "float", str: "string", list: "list", dict: "object"}
INT64 = range(-(2**63), 2**63)


@dataclass
class Shape:
    """What the values of a column have in common; those of a list's items, or of an object's keys, in turn."""

    kind: str | None = None  # None: nothing but null so far
    place: str = ""  # the first row that has it
    items: "Shape | None" = None
    keys: dict[str, "Shape"] = field(default_factory=dict)


def to_parquet(path: str | Path, out: str | Path) -> int:
    """Write the rows of a JSONL or Parquet file as Parquet; returns their number.

    A column has one type, which all its rows are read for before the first is written. A key that only some rows have
    is null in the others, which `read_rows` takes for absent.

    Raises ConfigError where `out` exists, cannot be written or does not end in .parquet; for a file without rows, for
    wrong rows, and for columns that hold what Parquet cannot: two types (an int and a float are two, as 5 and 5.0 are
    two answers), ints beyond 64 bits, objects without any key.
    """
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    out = Path(out)
    if out.suffix != ".parquet":
        raise ConfigError(f"--to-parquet {out}: wanted a name that ends in .parquet, by which it is read again")
    with new_file(out) as unfinished:
        schema = schema_of(path)
        num_rows = 0
        with ParquetWriter(unfinished, schema) as writer:
            for batch in itertools.batched(_rows(path), BATCH_ROWS):
                writer.write_batch(pyarrow.RecordBatch.from_pylist(list(batch), schema=schema))
                num_rows += len(batch)
    return num_rows


def to_jsonl(path: str | Path, out: str | Path) -> int:
    """Write the rows of a Parquet or JSONL file as JSONL, without keys of null; returns their number.

    Raises ConfigError where `out` exists, cannot be written or ends in .parquet, and for wrong rows.
    """
    out = Path(out)
    if out.suffix == ".parquet":
        raise ConfigError(f"--to-jsonl {out}: wanted another ending, as .parquet is read as Parquet")
    with new_file(out) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        num_rows = 0
        for row in _rows(path):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_rows += 1
    return num_rows


@contextlib.contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """A file to write that gets the name `out` at the end, or is removed where there is none."""
    unfinished = out.with_name(f".{out.name}.{os.getpid()}.unfinished")
    try:
        _refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        _refuse_existing(out)
        unfinished.rename(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    finally:
        if os.path.lexists(unfinished):
            unfinished.unlink()


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise ConfigError(f"{out} exists already; a conversion never overwrites")


def _rows(path: str | Path) -> Iterator[dict]:
    errors: list[str] = []
    for _, row in read_source(SourceConfig(path=str(path)), errors):
        yield row
    raise_if_any(errors, path)


def schema_of(path: str | Path) -> "Schema":
    """The schema that holds all rows of a file. Raises as to_parquet."""
    import pyarrow

    errors: list[str] = []
    columns: dict[str, Shape] = {}
    for place, row in read_source(SourceConfig(path=str(path)), errors):
        for key, value in row.items():
            _fit(columns.setdefault(key, Shape()), value, key, place, errors)
    for key, shape in columns.items():
        _refuse_empty_objects(shape, key, errors)
    raise_if_any(errors, path)
    if not columns:
        raise ConfigError(f"{path}: no rows with a value")
    return pyarrow.schema([(key, _arrow_type(shape)) for key, shape in columns.items()])


def _fit(shape: Shape, value: Any, column: str, place: str, errors: list[str]) -> None:
    """Make `shape` that of `value` too."""
    if value is None:
        return
    kind = KINDS[type(value)]
    if shape.kind is None:
        shape.kind, shape.place = kind, place
    if kind != shape.kind:
        first = f"where {shape.place} has {shape.kind}"
        errors.append(f"{place}: {column}: given {kind} {short(value)} {first}; a column of Parquet has one type")
    elif kind == "int" and value not in INT64:
        errors.append(f"{place}: {column}: given {short(value)}, but an int of Parquet has 64 bits")
    elif kind == "list":
        shape.items = shape.items or Shape()
        for item in value:
            _fit(shape.items, item, f"{column}[]", place, errors)
    elif kind == "object":
        for key, item in value.items():
            _fit(shape.keys.setdefault(key, Shape()), item, f"{column}.{key}", place, errors)


def _refuse_empty_objects(shape: Shape, column: str, errors: list[str]) -> None:
    if shape.kind == "object" and not shape.keys:
        errors.append(f"{shape.place}: {column}: objects without any key, which Parquet cannot hold")
    for key, child in shape.keys.items():
        _refuse_empty_objects(child, f"{column}.{key}", errors)
    if shape.items is not None:
        _refuse_empty_objects(shape.items, f"{column}[]", errors)


def _arrow_type(shape: Shape) -> "DataType":
    import pyarrow

    if shape.kind == "list":
        return pyarrow.list_(_arrow_type(shape.items))
    if shape.kind == "object":
        return pyarrow.struct([(key, _arrow_type(child)) for key, child in shape.keys.items()])
    types = {"bool": pyarrow.bool_(), "int": pyarrow.int64(), "float": pyarrow.float64(), "string": pyarrow.string()}
    return pyarrow.null() if shape.kind is None else types[shape.kind]
