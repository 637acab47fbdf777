"""Prompts that are too long, by their templated length: left out, refused or cut, and counted in each case."""

import json
import logging

import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.dataset import load_prompts
from megarl.data.stream import check_enough
from megarl.errors import ConfigError

TEMPLATE_TOKENS = 8  # of the toy's chat template around one user message; each digit of the text adds one


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return chat.load_tokenizer(folder / "model")


def write(path, prompts):
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(**fields):
    return DataConfig(train="unused.jsonl", **fields)


def text_of_length(num_tokens):
    return ("1234567890" * 50)[: num_tokens - TEMPLATE_TOKENS]


def user(text):
    return [{"role": "user", "content": text}]


def lengths(prompts):
    return [len(prompt.token_ids) for prompt in prompts]


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
@pytest.mark.parametrize("prompt", [str, user])
def test_prompts_over_the_limit_are_dropped_by_templated_length_with_one_line(
    tmp_path, tokenizer, caplog, name, prompt
):
    """O02."""
    path = write(tmp_path / name, [prompt(text_of_length(n)) for n in (10, 32, 33, 400, 32, 33)])
    with caplog.at_level(logging.INFO):
        prompts = load_prompts(path, settings(max_prompt_tokens=32), tokenizer)
    assert lengths(prompts) == [10, 32, 32]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("megarl")]
    assert lines == [f"{path}: dropped 3 of 6 prompts > 32 tokens (data.max_prompt_tokens)"]


def test_each_source_has_its_line_and_strings_and_messages_are_measured_alike(tmp_path, tokenizer, caplog):
    first = write(tmp_path / "a.jsonl", ["1?", text_of_length(33), user(text_of_length(33))])
    second = write(tmp_path / "b.jsonl", [text_of_length(33), user("1?")])
    sources = DataConfig.model_validate({"train": [str(first), str(second)]}).train
    prompts = load_prompts(sources, settings(max_prompt_tokens=32), tokenizer)
    assert [prompt.source_index for prompt in prompts] == [0, 1]
    assert f"{first}: dropped 2 of 3 prompts" in caplog.text and f"{second}: dropped 1 of 2 prompts" in caplog.text


def test_a_prompt_that_leaves_no_room_in_the_context_is_dropped(tmp_path, tokenizer, caplog):
    """O21."""
    path = write(tmp_path / "a.jsonl", [text_of_length(n) for n in (50, 63, 64)])
    prompts = load_prompts(path, settings(max_prompt_tokens=64), tokenizer, context_length=64)
    assert lengths(prompts) == [50, 63]
    assert "dropped 1 of 3 prompts > 63 tokens (the model's context less one new token)" in caplog.text


def test_no_prompt_left_is_refused_with_the_shortest(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [text_of_length(n) for n in (33, 40)])
    with pytest.raises(ConfigError, match=r"all 2 prompts > 32 tokens \(data.max_prompt_tokens\); the shortest has 33"):
        load_prompts(path, settings(max_prompt_tokens=32), tokenizer)


def test_prompts_that_filtering_leaves_too_few_of_are_refused(tmp_path, tokenizer):
    """O03."""
    data = settings(max_prompt_tokens=32)
    path = write(tmp_path / "a.jsonl", [text_of_length(n) for n in [20] * 5 + [40] * 4])
    prompts = load_prompts(path, data, tokenizer)
    with pytest.raises(ConfigError, match="5 prompts after filtering < algorithm.prompts_per_step=8"):
        check_enough(prompts, 8, data.train, "prompts after filtering")


def test_refuse_names_the_rows_and_counts_them(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [text_of_length(n) for n in [20, 33] + [40] * 11])
    with pytest.raises(ConfigError) as error:
        load_prompts(path, settings(max_prompt_tokens=32, overlong="refuse"), tokenizer)
    first, second, *others = str(error.value).splitlines()
    assert "data.overlong: refuse, 12 of 13 prompts > 32 tokens (data.max_prompt_tokens), the first 10:" in first
    assert second == f"  {path}:2: prompt: 33 tokens" and len(others) == 9


CUTS = [("truncate_left", "beginning", slice(-24, None)), ("truncate_right", "end", slice(None, 24))]


@pytest.mark.parametrize("overlong, end, kept", CUTS)
def test_truncation_cuts_the_last_message_and_nothing_else(tmp_path, tokenizer, caplog, overlong, end, kept):
    """O02, on request."""
    long, system = text_of_length(100), [{"role": "system", "content": "1"}]
    path = write(tmp_path / "a.jsonl", [user(text_of_length(32)), user(long), system + user(long)])
    whole, cut, third = load_prompts(path, settings(max_prompt_tokens=32, overlong=overlong), tokenizer)
    assert whole.messages == user(text_of_length(32))
    assert cut.messages == user(long[kept]) and cut.token_ids == chat.render(tokenizer, user(long[kept]))
    assert lengths([whole, cut, third]) == [32] * 3 and third.messages[0] == system[0]
    assert f"the last message lost its {end} in 2 of 3 prompts > 32 tokens" in caplog.text


@pytest.mark.parametrize("overlong", ["truncate_left", "truncate_right"])
@pytest.mark.parametrize("text", ["🎉" * 40, "naïve 漢字 " * 20, "Anna has 3 apples and " * 9, "\n\n  x" * 30])
def test_any_text_is_cut_to_fit_and_stays_a_part_of_itself(tmp_path, tokenizer, overlong, text):
    path = write(tmp_path / "a.jsonl", [text])
    for limit in (32, 20):
        [prompt] = load_prompts(path, settings(max_prompt_tokens=limit, overlong=overlong), tokenizer)
        [message] = prompt.messages
        assert text.endswith(message["content"]) if overlong == "truncate_left" else text.startswith(message["content"])
        assert limit - 8 < len(prompt.token_ids) <= limit
        assert prompt.token_ids == chat.render(tokenizer, prompt.messages)


def test_a_prompt_that_no_cut_makes_short_enough_is_named(tmp_path, tokenizer):
    earlier = [*user(text_of_length(60)), {"role": "assistant", "content": "1"}]
    path = write(tmp_path / "a.jsonl", [user("1?"), earlier + user("12345")])
    reason = "76 tokens, and nothing of the last message fits into 32"
    with pytest.raises(ConfigError, match=f"{path}:2: prompt: {reason}"):
        load_prompts(path, settings(max_prompt_tokens=32, overlong="truncate_left"), tokenizer)
