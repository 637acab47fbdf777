"""Rows to prompts: the same from JSONL and Parquet, and every wrong row named."""

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pyarrow import parquet

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.dataset import load_prompts
from megarl.data.responses import load_responses
from megarl.errors import ConfigError
from megarl.rewards.gsm8k import gsm8k
from megarl.sample import Sample

TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + toy.CHAT_TEMPLATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return chat.load_tokenizer(folder / "model")


@pytest.fixture(scope="module")
def tools_tokenizer(folder):
    (folder / "tools.jinja").write_text(TOOLS_TEMPLATE)
    return chat.load_tokenizer(folder / "model", str(folder / "tools.jinja"))


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    columns = list(dict.fromkeys(column for row in rows for column in row))
    parquet.write_table(pa.table({column: [row.get(column) for row in rows] for column in columns}), path)
    return path


def settings(**fields):
    return DataConfig(train="unused.jsonl", **fields)


def user(text):
    return [{"role": "user", "content": text}]


def without_source(prompts):
    """What both formats must agree in: all but the place."""
    for prompt in prompts:
        del prompt.metadata["source"]
    return prompts


def test_a_file_without_rows_is_refused(tmp_path, tokenizer):
    empty = write(tmp_path / "empty.jsonl", [])
    for load in (load_prompts, lambda *arguments: load_responses(*arguments, 256, ("response_key",))):
        with pytest.raises(ConfigError, match="no rows"):
            load(empty, settings(), tokenizer)
        with pytest.raises(ConfigError, match=f"{empty}: no rows"):
            rows = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "2", "response": "2"}])
            load(settings().model_validate({"train": [str(rows), str(empty)]}).train, settings(), tokenizer)


def test_string_and_messages_give_the_same_ids(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1?", "answer": "2"}, {"prompt": user("1+1?"), "answer": 2}])
    first, second = load_prompts(path, settings(), tokenizer)
    assert first.token_ids == second.token_ids
    assert first.messages == second.messages == user("1+1?")
    assert first.answer == second.answer == "2"


def test_messages_and_tools_in_parquet_give_the_ids_that_jsonl_gives(tmp_path, tools_tokenizer):
    """O01."""
    rows = [
        {"prompt": user("1+1?"), "answer": "2", "tools": [{"name": "f"}], "level": 1},
        {"prompt": [*user("1?"), {"role": "assistant", "content": "2", "name": "x"}, *user("3?")], "answer": "4"},
        {"prompt": user("1?"), "answer": "2", "tools": [{"name": "g", "parameters": {"x": {"type": "string"}}}]},
        {"prompt": user("1?"), "answer": "2"},
    ]
    rows[3]["tools"] = [{"name": "h", "description": "1", "parameters": {"y": 2, "a": 1}}]
    plain = [row | {"prompt": "1+1?"} for row in rows]
    for given_rows in (rows, plain):
        jsonl = load_prompts(write(tmp_path / "a.jsonl", given_rows), settings(), tools_tokenizer)
        both = load_prompts(write_parquet(tmp_path / "a.parquet", given_rows), settings(), tools_tokenizer)
        assert both[1].metadata == {"source": f"{tmp_path}/a.parquet:row 2"}
        assert without_source(both) == without_source(jsonl)
        assert [prompt.tools for prompt in both] == [row.get("tools") for row in rows]
    as_usual = '[{"name": "h", "description": "1", "parameters": {"a": 1, "y": 2}}]'
    assert tools_tokenizer.decode(both[3].token_ids).startswith(as_usual)


def test_tools_by_json_text_stay_as_they_are(tmp_path, tools_tokenizer):
    text = '[{"parameters": {"b": null, "a": 1}, "name": "h"}]'
    rows = [{"prompt": "1?", "answer": "2", "tools": text}]
    for path in (write(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        [prompt] = load_prompts(path, settings(), tools_tokenizer)
        assert tools_tokenizer.decode(prompt.token_ids).startswith(text)


TEXT = st.text(min_size=1, max_size=8).filter(lambda text: text.strip() and "<|" not in text)
INTEGER = st.integers(-(2**63), 2**63 - 1)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT},
    optional={"name": TEXT, "reasoning_content": st.none() | TEXT},
)
MESSAGES = st.tuples(st.lists(MESSAGE, max_size=2), TEXT).map(lambda turns: [*turns[0], *user(turns[1])])
PARAMETERS = st.fixed_dictionaries({"x": TEXT}, optional={"y": INTEGER, "z": st.none() | st.lists(TEXT, max_size=2)})
TOOL = st.fixed_dictionaries({"name": TEXT}, optional={"parameters": PARAMETERS})
TOOLS = st.lists(TOOL, min_size=1, max_size=2)
VALUE = st.sampled_from(
    [
        INTEGER,
        TEXT,
        st.booleans(),
        st.floats(allow_nan=False),
        st.lists(st.none() | INTEGER, max_size=3),
        PARAMETERS,
        st.lists(PARAMETERS, max_size=2),
    ]
)


@st.composite
def tables(draw):
    """Rows whose columns have one type each, as Parquet wants it, and hold null or are absent here and there."""
    required = {"prompt": draw(st.sampled_from([TEXT, MESSAGES])), "answer": draw(st.sampled_from([TEXT, INTEGER]))}
    optional = {"tools": draw(st.sampled_from([TOOLS, TOOLS.map(json.dumps)]))}
    optional |= {name: st.none() | draw(VALUE) for name in ("level", "source")}
    return draw(st.lists(st.fixed_dictionaries(required, optional=optional), min_size=1, max_size=4))


@hypothesis_settings(deadline=None, max_examples=60)
@given(tables())
def test_jsonl_and_parquet_give_the_same_prompts(tools_tokenizer, rows):
    """O01."""
    with tempfile.TemporaryDirectory() as folder:
        jsonl = load_prompts(write(Path(folder, "a.jsonl"), rows), settings(), tools_tokenizer)
        both = load_prompts(write_parquet(Path(folder, "a.parquet"), rows), settings(), tools_tokenizer)
    assert without_source(both) == without_source(jsonl)


def test_several_sources_come_one_after_another_and_every_prompt_knows_its_own(tmp_path, tokenizer):
    first = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "2"}])
    second = write_parquet(tmp_path / "b.parquet", [{"prompt": "2?", "answer": "3"}, {"prompt": "3?", "answer": "4"}])
    sources = settings().model_validate({"train": [str(first), {"path": str(second), "weight": 2.0}]}).train
    prompts = load_prompts(sources, settings(), tokenizer)
    assert [prompt.source_index for prompt in prompts] == [0, 1, 1]
    assert [prompt.metadata["source"] for prompt in prompts] == [f"{first}:1", f"{second}:row 1", f"{second}:row 2"]
    for path in (first, second):
        path.write_bytes(b"{")
    first.rename(tmp_path / "c.jsonl").write_text('{"prompt": ""}\n')
    write(second.with_suffix(".jsonl"), [{"prompt": 7, "answer": "1"}])
    sources = settings().model_validate({"train": [f"{tmp_path}/c.jsonl", f"{tmp_path}/b.jsonl"]}).train
    with pytest.raises(ConfigError, match=rf"3 error\(s\) in {tmp_path}/c.jsonl, {tmp_path}/b.jsonl:"):
        load_prompts(sources, settings(), tokenizer)


def test_other_columns_and_the_source_are_kept(tmp_path, tokenizer):
    rows = [{"question": "1?", "answer": "2", "level": 3}, {"question": "1?", "answer": "2", "source": "web"}]
    path = write(tmp_path / "a.jsonl", rows)
    first, second = load_prompts(path, settings(prompt_key="question"), tokenizer)
    assert first.metadata == {"level": 3, "source": f"{path}:1"}
    assert second.metadata == {"source_column": "web", "source": f"{path}:2"}


def test_system_prompt_is_put_first_unless_the_row_has_its_own(tmp_path, tokenizer):
    own = [{"role": "system", "content": "mine"}, *user("1?")]
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "2"}, {"prompt": own, "answer": "2"}])
    first, second = load_prompts(path, settings(system_prompt="yours"), tokenizer)
    assert first.messages == [{"role": "system", "content": "yours"}, *user("1?")]
    assert tokenizer.decode(first.token_ids).startswith("<|im_start|>system\nyours<|im_end|>\n<|im_start|>user\n1?")
    assert second.messages == own


def test_messages_of_tools_reach_the_template_as_they_are(tmp_path, folder):
    shown = "{{ m.role }} {{ m.content }} {{ m.tool_calls | tojson if m.tool_calls }}|"
    (folder / "calls.jinja").write_text("{% for m in messages %}" + shown + "{% endfor %}assistant ")
    tokenizer = chat.load_tokenizer(folder / "model", str(folder / "calls.jinja"))
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [*user("1?"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "content": "", "tool_call_id": "1"}]
    rows = [{"prompt": turns, "answer": "2"}, {"prompt": user("1?"), "answer": "2"}]
    for path in (write(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)):
        first, _ = load_prompts(path, settings(), tokenizer)
        assert first.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert tokenizer.decode(first.token_ids) == f"user 1? |assistant  {json.dumps([call])}|tool  |assistant "


WRONG_PROMPTS = ["", "  ", [], 7, None, [{"role": "user"}], user(""), ["hello"], [{"role": "user", "content": 3}]]
WRONG_PROMPTS += [[*user("1"), {"role": "assistant", "content": "2"}], [user("1")[0] | {"weight": 1}]]
WRONG_PROMPTS += [[user("1")[0] | {"name": 1}], [{"role": "user", "content": "1", "tool_calls": "f"}]]
WRONG_TOOLS = ["f", "[7]", 7, {"name": "f"}, [{"description": "f"}], [{"function": {"x": 1}}], "[{]"]
WRONG_TOOLS += ['[{"name": "f", "name": "g"}]']
WRONG_ROWS = [  # (row, the column that is to blame)
    ({"answer": "1"}, "prompt"),
    ({"prompt": "fine"}, "answer"),
    ("{not json", "JSON"),
    *(({"prompt": prompt, "answer": "1"}, "prompt") for prompt in WRONG_PROMPTS),
    *(({"prompt": "fine", "answer": answer}, "answer") for answer in (True, None, [1], "", float("nan"))),
    *(({"prompt": "fine", "answer": "1", "tools": tools}, "tools") for tools in WRONG_TOOLS),
]


@pytest.mark.parametrize("row, column", WRONG_ROWS, ids=str)
def test_a_wrong_row_is_named_with_its_column(tmp_path, tokenizer, row, column):
    path = write(tmp_path / "a.jsonl", [{"prompt": "fine", "answer": "1"}, row])
    with pytest.raises(ConfigError, match=r"1 error\(s\).*\n.*a.jsonl:2: .*") as error:
        load_prompts(path, settings(), tokenizer)
    assert column in str(error.value).splitlines()[1]


def test_every_wrong_row_is_named_at_once(tmp_path, tokenizer):
    path = write(tmp_path / "all.jsonl", [{"prompt": "fine", "answer": "1"}, *(row for row, _ in WRONG_ROWS)])
    with pytest.raises(ConfigError, match=rf"{len(WRONG_ROWS)} error\(s\)"):
        load_prompts(path, settings(), tokenizer)


def test_tools_that_the_template_leaves_out_are_refused_unless_they_are_not_to_be_read(tmp_path, tokenizer):
    rows = [{"prompt": "1?", "answer": "2", "tools": tools} for tools in ([{"name": "f"}], [], "[]", "null", None)]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=r"1 error.*\n.*a.jsonl:1: .*leaves out the tools; data.tools_key: null"):
        load_prompts(path, settings(), tokenizer)
    first, *others = load_prompts(path, settings(tools_key=None), tokenizer)
    assert first.tools is None and first.metadata["tools"] == [{"name": "f"}]
    assert len({tuple(prompt.token_ids) for prompt in (first, *others)}) == 1


def test_without_answer_key_answers_are_none_and_the_column_is_metadata(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "2"}, {"prompt": "1?"}])
    first, second = load_prompts(path, settings(answer_key=None), tokenizer)
    assert first.answer is None and second.answer is None
    assert first.metadata["answer"] == "2"


def test_gold_as_int_float_or_string_scores_the_same(tmp_path, tokenizer):
    answers = [18, 18.0, "18", "#### 18", "9 + 9 = 18\n#### 18"]
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": answer} for answer in answers])
    for prompt in load_prompts(path, settings(), tokenizer):
        for text, reward in (("#### 18", 1.0), ("#### 19", 0.0)):
            assert gsm8k(Sample.from_response(prompt, [5], group_id=0, index=0, response_text=text)) == reward
