"""JSONL rows to prompts: every wrong row named, long prompts dropped with a count, an order that can be resumed."""

import json
import logging

import pytest

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.dataset import PromptStream, check_enough, load_prompts, raise_if_any, read_rows
from megarl.data.responses import load_responses
from megarl.errors import ConfigError
from megarl.rewards import REWARDS, score
from megarl.sample import Prompt, Sample

TEMPLATE_TOKENS = 8  # of the toy's chat template around one user message; each digit of the text adds one


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return chat.load_tokenizer(folder / "model")


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def settings(**fields):
    return DataConfig(train="unused.jsonl", **fields)


def text_of_length(num_tokens):
    return "1" * (num_tokens - TEMPLATE_TOKENS)


def user(text):
    return [{"role": "user", "content": text}]


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
    path.write_bytes(path.read_bytes() + b'{"x": "\xff"}\n{"x": "half \\ud83d of a pair"}\n')
    with pytest.raises(ConfigError) as error:
        read(path)
    assert "4 error(s)" in str(error.value)
    for line in (2, 4, 5, 6):
        assert f"{path}:{line}:" in str(error.value)
    assert f"{path}:1:" not in str(error.value)


def test_more_than_ten_errors_are_counted_but_not_all_shown(tmp_path):
    path = write(tmp_path / "a.jsonl", ["{"] * 25)
    with pytest.raises(ConfigError, match="25 error") as error:
        read(path)
    assert str(error.value).count("not JSON") == 10


def test_a_missing_or_empty_file_is_refused(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "none.jsonl")
    empty = write(tmp_path / "empty.jsonl", [])
    for load in (load_prompts, lambda *arguments: load_responses(*arguments, 256, ("response_key",))):
        with pytest.raises(ConfigError, match="no rows"):
            load(empty, settings(), tokenizer)


def test_string_and_messages_give_the_same_ids(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1?", "answer": "2"}, {"prompt": user("1+1?"), "answer": 2}])
    first, second = load_prompts(path, settings(), tokenizer)
    assert first.token_ids == second.token_ids
    assert first.messages == second.messages == user("1+1?")
    assert first.answer == second.answer == "2"


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


def test_overlong_prompts_are_dropped_by_templated_length_with_one_line(tmp_path, tokenizer, caplog):
    rows = [{"prompt": text_of_length(n), "answer": "1"} for n in (10, 32, 33)]
    rows += [{"prompt": user(text_of_length(n)), "answer": "1"} for n in (400, 32, 33)]
    path = write(tmp_path / "train.jsonl", rows)
    with caplog.at_level(logging.INFO):
        prompts = load_prompts(path, settings(max_prompt_tokens=32), tokenizer)
    assert [len(prompt.token_ids) for prompt in prompts] == [10, 32, 32]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("megarl")] == [
        f"dropped 3 of 6 prompts longer than data.max_prompt_tokens=32 ({path})"
    ]


def test_a_prompt_that_fills_the_context_is_dropped(tmp_path, tokenizer, caplog):
    rows = [{"prompt": text_of_length(n), "answer": "1"} for n in (50, 63, 64)]
    path = write(tmp_path / "a.jsonl", rows)
    prompts = load_prompts(path, settings(max_prompt_tokens=64), tokenizer, context_length=64)
    assert [len(prompt.token_ids) for prompt in prompts] == [50, 63]
    assert "dropped 1 of 3 prompts longer than 63, the model's context" in caplog.text


def test_no_prompt_left_is_refused_with_the_shortest(tmp_path, tokenizer):
    rows = [{"prompt": text_of_length(n), "answer": "1"} for n in (33, 40)]
    with pytest.raises(ConfigError, match="all 2 prompts.*=32; the shortest has 33"):
        load_prompts(write(tmp_path / "a.jsonl", rows), settings(max_prompt_tokens=32), tokenizer)


def test_every_wrong_row_is_named_at_once(tmp_path, tokenizer):
    wrong_prompts = ["", "  ", [], 7, None, [{"role": "user"}], [{"role": "user", "content": ""}], ["hello"]]
    wrong_prompts += [[*user("1"), {"role": "assistant", "content": "2"}], [{"role": "user", "content": 3}]]
    wrong_answers = [True, None, [1], "", float("nan")]
    rows = [{"prompt": "fine", "answer": "1"}, {"answer": "1"}, {"prompt": "fine"}, "{not json"]
    rows += [{"prompt": prompt, "answer": "1"} for prompt in wrong_prompts]
    rows += [{"prompt": "fine", "answer": answer} for answer in wrong_answers]
    for first_line in range(2, len(rows) + 1):  # ten are shown: look at each row alone as well
        path = write(tmp_path / f"{first_line}.jsonl", [rows[first_line - 1]])
        with pytest.raises(ConfigError, match=rf"1 error\(s\).*\n.*{first_line}.jsonl:1: .*") as error:
            load_prompts(path, settings(), tokenizer)
        key = "JSON" if first_line == 4 else "answer" if first_line == 3 or first_line > 14 else "prompt"
        assert key in str(error.value).splitlines()[1]
    path = write(tmp_path / "all.jsonl", rows)
    with pytest.raises(ConfigError, match=rf"{len(rows) - 1} error\(s\)"):
        load_prompts(path, settings(), tokenizer)


def test_without_answer_key_answers_are_none_and_the_column_is_metadata(tmp_path, tokenizer):
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": "2"}, {"prompt": "1?"}])
    first, second = load_prompts(path, settings(answer_key=None), tokenizer)
    assert first.answer is None and second.answer is None
    assert first.metadata["answer"] == "2"


def test_gold_as_int_float_or_string_scores_the_same(tmp_path, tokenizer):
    answers = [18, 18.0, "18", "#### 18", "9 + 9 = 18\n#### 18"]
    path = write(tmp_path / "a.jsonl", [{"prompt": "1?", "answer": answer} for answer in answers])
    samples = [
        Sample.from_response(prompt, [5], group_id=0, index=0, response_text=text)
        for prompt in load_prompts(path, settings(), tokenizer)
        for text in ("#### 18", "#### 19")
    ]
    score(samples, REWARDS["gsm8k"])
    assert [sample.reward for sample in samples] == [1.0, 0.0] * len(answers)


def test_fewer_prompts_than_a_step_needs_is_refused():
    prompts = [Prompt(messages=user("1"), token_ids=[1])] * 5
    with pytest.raises(ConfigError, match=r"5 prompts after filtering < algorithm.prompts_per_step=8 \(a.jsonl\)"):
        check_enough(prompts, 8, "a.jsonl")
    with pytest.raises(ConfigError, match=r"5 rows < algorithm.prompts_per_step=8 \(a.jsonl\)"):
        check_enough(prompts, 8, "a.jsonl", "rows")
    check_enough(prompts, 5, "a.jsonl")


def test_prompts_that_filtering_leaves_too_few_of_are_refused(tmp_path, tokenizer):
    rows = [{"prompt": text_of_length(n), "answer": "1"} for n in [20] * 5 + [40] * 4]
    path = write(tmp_path / "a.jsonl", rows)
    prompts = load_prompts(path, settings(max_prompt_tokens=32), tokenizer)
    with pytest.raises(ConfigError, match="5 prompts after filtering < algorithm.prompts_per_step=8"):
        check_enough(prompts, 8, path)


def numbered_prompts(count):
    return [Prompt(messages=user(str(i)), token_ids=[i]) for i in range(count)]


def ids(prompts):
    return [prompt.token_ids[0] for prompt in prompts]


def test_each_epoch_uses_every_prompt_once_though_steps_straddle_it():
    stream = PromptStream(numbered_prompts(10), seed=1)
    order = ids([prompt for _ in range(10) for prompt in stream.next(3)])
    epochs = [order[0:10], order[10:20], order[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream.position == (3, 0)


def test_the_order_depends_on_the_seed_and_not_on_the_step_size():
    orders = [ids(PromptStream(numbered_prompts(10), seed).next(20)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    stream = PromptStream(numbered_prompts(10), seed=1)
    assert ids(stream.next(7) + stream.next(13)) == orders[0]


def test_the_order_stays_what_saved_runs_have_seen():
    assert ids(PromptStream(numbered_prompts(8), seed=1).next(8)) == [6, 3, 4, 5, 0, 2, 7, 1]


def test_a_restored_position_goes_on_in_the_same_order():
    for steps_before in (0, 3, 5, 7):  # within an epoch of five steps, at its end, in the next
        stream = PromptStream(numbered_prompts(10), seed=4)
        for _ in range(steps_before):
            stream.next(2)
        restored = PromptStream(numbered_prompts(10), seed=4)
        restored.position = stream.position
        assert ids(restored.next(15)) == ids(stream.next(15))


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(ConfigError):
        PromptStream([], seed=1)
