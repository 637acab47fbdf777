"""JSONL to Parquet and back: the same rows, or an error that says which row cannot be."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import convert
from megarl.data.convert import to_jsonl, to_parquet
from megarl.data.sources import read_rows
from megarl.errors import ConfigError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
SCALARS = [st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXTS]
ROWS = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "tools": [{"name": "f", "parameters": {"x": {"type": "int"}}}]},
    {"prompt": [{"role": "user", "content": "５\u2028"}], "level": 3, "score": 0.5},
    {"prompt": [], "tools": [{"name": "g", "parameters": {"y": {"type": "str", "enum": ["a", "b"]}}}], "ok": True},
]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows_of(path):
    errors = []
    rows = [row for _, row in read_rows(path, errors)]
    assert not errors
    return rows


def typed(value):
    """Equal only for values of equal types: 1, 1.0 and True are three, and so are 0.0 and -0.0 two."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return [typed(item) for item in value] if isinstance(value, list) else (type(value), repr(value))


def columns(children):
    """Strategies of values, drawn so that all values of one column have one type."""
    of_list = children.map(lambda values: st.lists(values, max_size=2))
    keys = st.dictionaries(TEXTS, children, min_size=1, max_size=2)
    return of_list | keys.map(lambda named: st.fixed_dictionaries({}, optional=named))


COLUMNS = st.dictionaries(TEXTS, st.recursive(st.sampled_from(SCALARS), columns, max_leaves=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(COLUMNS.flatmap(lambda named: st.lists(st.fixed_dictionaries({}, optional=named), min_size=1, max_size=4)))
def test_rows_survive_parquet_and_back_with_their_types(rows):
    with tempfile.TemporaryDirectory() as folder:
        given_file = write(Path(folder) / "a.jsonl", rows)
        try:
            to_parquet(given_file, f"{folder}/b.parquet")
        except ConfigError as error:
            assert "objects without any key" in str(error) or "no rows with a value" in str(error)
            return
        to_jsonl(f"{folder}/b.parquet", f"{folder}/c.jsonl")
        expected = typed(rows_of(given_file))
        assert typed(rows_of(f"{folder}/b.parquet")) == expected
        assert typed(rows_of(f"{folder}/c.jsonl")) == expected


def test_messages_tools_and_rows_with_other_keys_are_the_same_in_both_formats(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    assert to_parquet(path, tmp_path / "new" / "b.parquet") == 3
    assert to_jsonl(tmp_path / "new" / "b.parquet", tmp_path / "c.jsonl") == 3
    assert rows_of(tmp_path / "new" / "b.parquet") == rows_of(tmp_path / "c.jsonl") == ROWS


def test_a_column_that_appears_after_the_first_batch_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "BATCH_ROWS", 4)
    rows = [{"x": i} | ({"late": [None, "y"]} if i == 9 else {}) for i in range(10)]
    assert to_parquet(write(tmp_path / "a.jsonl", rows), tmp_path / "b.parquet") == 10
    assert rows_of(tmp_path / "b.parquet") == rows


@pytest.mark.parametrize(
    "rows, errors",
    [
        ([{"x": 1}, {"x": "a"}], ["a.jsonl:2: x: given string 'a' where a.jsonl:1 has int"]),
        ([{"x": None}, {"x": 5}, {"x": 5.0}], ["a.jsonl:3: x: given float 5.0 where a.jsonl:2 has int"]),
        ([{"x": True}, {"x": 1}], ["a.jsonl:2: x: given int 1 where a.jsonl:1 has bool"]),
        ([{"x": "a"}, {"x": [{"role": "user"}]}], ["a.jsonl:2: x: given list [{'role': 'user'}] where"]),
        ([{"x": [1, "a"]}], ["a.jsonl:1: x[]: given string 'a' where a.jsonl:1 has int"]),
        ([{"x": [{"y": 1}]}, {"x": [{"y": {}}]}], ["a.jsonl:2: x[].y: given object {} where a.jsonl:1 has int"]),
        ([{"x": {}}, {"x": {}, "y": {"z": {}}}], ["a.jsonl:1: x: objects without any key", "a.jsonl:2: y.z: objects"]),
        ([{"x": 2**63}], ["a.jsonl:1: x: given 9223372036854775808, but an int of Parquet has 64 bits"]),
        ([{"x": 1}, "{", {"x": "a"}], ["a.jsonl:2: not JSON", "a.jsonl:3: x: given string"]),
    ],
)
def test_what_parquet_cannot_hold_is_refused_with_column_types_and_rows_and_leaves_nothing(tmp_path, rows, errors):
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError) as error:
        to_parquet(path, tmp_path / "b.parquet")
    text = str(error.value).replace(f"{tmp_path}/", "")
    assert all(expected in text for expected in errors), text
    assert len(text.splitlines()) == 1 + len(errors)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_without_rows_is_refused(tmp_path):
    for rows in ([], [{}], [{"x": None}]):
        with pytest.raises(ConfigError, match="a.jsonl: no rows with a value"):
            to_parquet(write(tmp_path / "a.jsonl", rows), tmp_path / "b.parquet")


def test_a_conversion_never_overwrites(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    for convert_to, name in ((to_parquet, "b.parquet"), (to_jsonl, "b.jsonl")):
        (tmp_path / name).write_text("mine")
        with pytest.raises(ConfigError, match=f"{name} exists already"):
            convert_to(path, tmp_path / name)
        assert (tmp_path / name).read_text() == "mine"
    with pytest.raises(ConfigError, match="a.jsonl exists already"):
        to_jsonl(path, path)


@pytest.mark.parametrize("out", ["a.jsonl/b.parquet", "/proc/b.parquet", "x" * 250 + ".parquet"])
def test_a_place_that_cannot_be_written_is_refused(tmp_path, out):
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=f"{out}: cannot be written: .*Errno"):
        to_parquet(path, tmp_path / out)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", ROWS * 9)
    for convert_to, name in ((to_parquet, "b.parquet"), (to_jsonl, "b.jsonl")):
        unfinished = tmp_path / f".{name}.{os.getpid()}.unfinished"
        unfinished.symlink_to("/dev/full")
        with pytest.raises(ConfigError, match=f"{name}: cannot be written: .*No space left on device"):
            convert_to(path, tmp_path / name)
        assert list(tmp_path.iterdir()) == [path]


def test_a_name_that_would_be_read_as_the_other_format_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match="--to-parquet .*b.pq: wanted a name that ends in .parquet"):
        to_parquet(path, tmp_path / "b.pq")
    with pytest.raises(ConfigError, match="--to-jsonl .*b.parquet: wanted another ending"):
        to_jsonl(path, tmp_path / "b.parquet")


def test_a_conversion_that_fails_half_way_leaves_nothing(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"x": 1}] * 5 + ["{"])
    with pytest.raises(ConfigError, match="a.jsonl:6: not JSON"):
        to_jsonl(path, tmp_path / "b.jsonl")
    with pytest.raises(ConfigError, match="none.jsonl: no such file"):
        to_parquet(tmp_path / "none.jsonl", tmp_path / "b.parquet")
    assert list(tmp_path.iterdir()) == [path]
