"""Rows are the same plain values wherever they lie: JSONL, Parquet, a Hugging Face dataset."""

import datetime
import decimal
import json
import uuid

import datasets
import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.config_data import SourceConfig
from megarl.data.row_errors import raise_if_any
from megarl.data.sources import read_rows, read_source
from megarl.errors import ConfigError


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    errors = []
    rows = list(read_rows(path, errors))
    raise_if_any(errors, path)
    return rows


def test_rows_come_with_line_numbers_and_blank_lines_are_none(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"x": 1}, "", {"x": "é\u2028 \U0001f600"}])
    assert read(path) == [(1, {"x": 1}), (3, {"x": "é\u2028 \U0001f600"})]


def test_every_line_that_is_no_row_is_named_at_once(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"x": 1}, "{oops", {"x": 2}, "[1]"])
    path.write_bytes(path.read_bytes() + b'{"x": "\xff"}\n{"x": "half \\ud83d of a pair"}\n{"y": {"x": 1, "x": 2}}\n')
    path.write_bytes(path.read_bytes() + b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n")
    with pytest.raises(ConfigError) as error:
        read(path)
    assert "6 error(s)" in str(error.value)
    for line in (2, 4, 5, 6, 7, 8):
        assert f"{path}:{line}:" in str(error.value)
    assert f"{path}:7: not JSON: one key twice among x, x" in str(error.value)
    assert f"{path}:1:" not in str(error.value)


def test_more_than_ten_errors_are_counted_but_not_all_shown(tmp_path):
    path = write(tmp_path / "a.jsonl", ["{"] * 25)
    with pytest.raises(ConfigError, match="25 error") as error:
        read(path)
    assert str(error.value).count("not JSON") == 10


def test_a_missing_file_is_refused(tmp_path):
    for name in ("none.jsonl", "none.parquet", "x" * 256):
        with pytest.raises(ConfigError, match="no such file"):
            read(tmp_path / name)


def test_a_file_that_cannot_be_read_is_refused():
    with pytest.raises(ConfigError, match="/proc/self/mem: cannot be read: Input/output error"):
        read("/proc/self/mem")


def test_null_is_as_if_it_was_not_there_at_any_depth(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"x": None, "y": {"z": None, "w": [{"v": None, "u": 1}, None]}}])
    assert read(path) == [(1, {"y": {"w": [{"u": 1}, None]}})]


DAY, TIME = datetime.date(2024, 1, 31), datetime.time(12, 30)
PLAIN = [  # (what Parquet holds, what a row has)
    (pa.array(["é"], pa.large_string()), "é"),
    (pa.array(["é"], pa.string_view()), "é"),
    (pa.array(["é"]).dictionary_encode(), "é"),
    (pa.array(["é".encode()]), "é"),
    (pa.array([b"ab"], pa.binary(2)), "ab"),
    (pa.array([[1, 2]], pa.large_list(pa.int8())), [1, 2]),
    (pa.array([[1.5, 2]], pa.list_(pa.float32(), 2)), [1.5, 2.0]),
    (pa.array([1.5], pa.float16()), 1.5),
    (pa.array([True]), True),
    (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    (pa.array([[("k", 1), ("l", None)]], pa.map_(pa.string(), pa.int64())), {"k": 1}),
    (pa.array([[(7, "x")]], pa.map_(pa.int32(), pa.string())), {"7": "x"}),
    (pa.array([{"k": None, "l": [{"m": None, "n": 1}]}]), {"l": [{"n": 1}]}),
    (pa.array([decimal.Decimal(100)], pa.decimal128(9, 2)), "100.00"),
    (pa.array([DAY]), "2024-01-31"),
    (pa.array([TIME]), "12:30:00"),
    (pa.array([datetime.datetime.combine(DAY, TIME)], pa.timestamp("ns")), "2024-01-31T12:30:00"),
    (pa.array([datetime.datetime.combine(DAY, TIME)], pa.timestamp("s", "UTC")), "2024-01-31T12:30:00+00:00"),
    (pa.array([uuid.UUID(int=7).bytes], pa.uuid()), str(uuid.UUID(int=7))),
]


@pytest.mark.parametrize("column, value", PLAIN, ids=lambda value: str(getattr(value, "type", "")))
def test_what_json_does_not_have_becomes_what_it_has(tmp_path, column, value):
    parquet.write_table(pa.table({"x": column, "nothing": pa.nulls(1)}), tmp_path / "a.parquet")
    [(number, row)] = read(tmp_path / "a.parquet")
    assert (number, row) == (1, {"x": value})
    assert type(row["x"]) is type(value) and json.loads(json.dumps(row)) == row


def test_what_cannot_become_plain_is_named_with_its_row_and_column(tmp_path):
    spans = [None, None, datetime.timedelta(seconds=3)]
    table = pa.table({"ok": [1, 2, 3], "image": [b"x", b"\xff", b"y"], "time": spans})
    parquet.write_table(table, tmp_path / "a.parquet")
    errors = []
    rows = list(read_rows(tmp_path / "a.parquet", errors))
    assert rows == [(1, {"ok": 1, "image": "x"})]
    assert errors[0].startswith(f"{tmp_path}/a.parquet:row 2: image: 'utf-8' codec can't decode byte 0xff")
    assert errors[1] == f"{tmp_path}/a.parquet:row 3: time: a value of type timedelta, which JSON does not have"


def test_parquet_is_read_in_batches_and_known_by_its_first_bytes_too(tmp_path):
    parquet.write_table(pa.table({"x": range(2500)}), tmp_path / "rows", row_group_size=700)
    assert read(tmp_path / "rows") == [(x + 1, {"x": x}) for x in range(2500)]
    [*_, (place, row)] = read_source(SourceConfig(path=str(tmp_path / "rows")), [])
    assert (place, row) == (f"{tmp_path}/rows:row 2500", {"x": 2499})


def test_parquet_that_is_broken_is_refused_with_the_file_and_the_reason(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"x": [str(x) * 10 for x in range(999)]})
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    whole = path.read_bytes()
    for content in (b"", b'{"x": 1}\n', whole[: len(whole) // 2], whole[:50] + b"\xff" * 300 + whole[350:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{path}: cannot be read as Parquet: \w+"):
            read(path)


def test_a_name_or_a_key_that_is_there_twice_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]), path)
    with pytest.raises(ConfigError, match="two columns of one name among x, x"):
        read(path)
    parquet.write_table(pa.table({"x": pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))}), path)
    with pytest.raises(ConfigError, match=f"{path}: a map with one key twice: .*'k'"):
        read(path)


OFFSETS = pa.array([0, 1], pa.int32()).buffers()[1]
UNREADABLE = [
    (pa.Array.from_buffers(pa.string(), 1, [None, OFFSETS, pa.py_buffer(b"\xff")]), "'utf-8' codec can't decode"),
    (pa.array([253402300800], pa.timestamp("s")), "date value out of range"),  # the year 10000
    (pa.StructArray.from_arrays([pa.array([1])] * 2, names=["k", "k"]), "duplicate field names"),
]


@pytest.mark.parametrize("column, reason", UNREADABLE, ids=lambda value: str(getattr(value, "type", "")))
def test_what_python_cannot_hold_is_refused_with_the_rows(tmp_path, column, reason):
    parquet.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=f"a.parquet: cannot read rows 1 to 1: .*{reason}"):
        read(tmp_path / "a.parquet")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A folder that `datasets` takes by name, without a hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = [{"prompt": [{"role": "user", "content": "1?"}], "level": 3}, {"prompt": [], "more": {"x": 1}}]
    write(tmp_path / "set" / "test.jsonl", rows)
    return tmp_path / "set", rows


def test_a_dataset_by_name_gives_the_rows_of_its_files(dataset):
    folder, rows = dataset
    place = f"{folder}/test:row "
    found = list(read_source(SourceConfig(name=str(folder), split="test"), []))
    assert found == [(f"{place}1", rows[0]), (f"{place}2", rows[1])]
    assert len(list(read_source(SourceConfig(name=str(folder), subset="default", split="test[1:]"), []))) == 1


MIXED = [
    {"prompt": "1?", "answer": 1, "tools": [{"name": "f", "parameters": {"enum": [1, "a"]}}], "y": {"z": {}}},
    {"prompt": [{"role": "user", "content": "2?"}], "answer": "b", "tools": [{"name": "g", "parameters": {}}], "y": {}},
]


def test_columns_of_several_types_that_datasets_keeps_as_json_are_read_as_they_were(dataset):
    folder = dataset[0]
    write(folder / "test.jsonl", MIXED)
    assert [row for _, row in read_source(SourceConfig(name=str(folder), split="test"), [])] == MIXED
    datasets.load_dataset(str(folder), split="test").to_parquet(f"{folder}.parquet")
    assert [row for _, row in read(f"{folder}.parquet")] == MIXED


def test_a_hub_that_breaks_off_is_refused_with_the_dataset(monkeypatch):
    def load_dataset(*_, **__):
        raise httpx.RemoteProtocolError("Server disconnected without sending a response.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match="a/b/train: the dataset cannot be loaded: Server disconnected"):
        list(read_source(SourceConfig(name="a/b"), []))


def test_a_dataset_with_a_broken_file_is_refused_with_the_reason(dataset):
    folder = dataset[0]
    (folder / "test.jsonl").write_text('{"x": 1}\n{"x": 2\n')
    with pytest.raises(ConfigError, match="/test: the dataset cannot be loaded: .*JSON parse error"):
        list(read_source(SourceConfig(name=str(folder), split="test"), []))


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, r"Unknown split \"train\". Should be one of \['test'\]"),
        ({"split": "test", "subset": "main"}, r"'main' not found. Available: \['default'\]"),
        ({"name": "nobody/nothing"}, "Couldn't reach 'nobody/nothing' on the Hub"),
    ],
)
def test_a_dataset_that_is_not_there_is_refused_with_what_there_is(dataset, fields, reason):
    source = SourceConfig(**{"name": str(dataset[0])} | fields)
    with pytest.raises(ConfigError, match=f"{source}: the dataset cannot be loaded: .*{reason}"):
        list(read_source(source, []))
