"""Rows with one response or a pair of them to samples, and sequences with a place for their score."""

import json

import pytest
import torch

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.responses import load_responses, with_score_token
from megarl.errors import ConfigError
from megarl.sample import Prompt, Sample

ONE, PAIR = ("response_key",), ("chosen_key", "rejected_key")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return chat.load_tokenizer(folder / "model")


def load(tmp_path, tokenizer, rows, keys, context_length=256, **fields):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train="unused", prompt_key="question", **fields)
    return load_responses(path, data, tokenizer, context_length, keys)


def refused(tmp_path, tokenizer, rows, keys, **arguments) -> list[str]:
    """The lines about wrong rows, from their numbers on."""
    with pytest.raises(ConfigError) as error:
        load(tmp_path, tokenizer, rows, keys, **arguments)
    return [line.partition("rows.jsonl:")[2] for line in str(error.value).splitlines()[1:]]


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text, **more):
    return [{"role": "assistant", "content": text} | more]


def test_the_response_and_the_end_of_turn_are_trained(tmp_path, tokenizer):
    rows = [{"question": "1?", "response": "3 + 4 = 7", "level": 3}]
    rows += [{"question": user("2?"), "response": assistant("I")}]
    first, second = load(tmp_path, tokenizer, rows, ONE)
    trained = first.token_ids[first.loss_mask].tolist()
    assert tokenizer.decode(trained) == "3 + 4 = 7<|im_end|>" == first.response_text + "<|im_end|>"
    assert trained[-1] == tokenizer.eos_token_id
    assert first.token_ids[: first.prompt_length].tolist() == first.prompt.token_ids
    assert not first.loss_mask[: first.prompt_length].any()
    assert [(sample.group_id, sample.index) for sample in (first, second)] == [(0, 0), (1, 1)]
    assert first.prompt.metadata == {"level": 3, "source": f"{tmp_path}/rows.jsonl:1"}  # the response is not in it
    assert second.response_text == "I"


def test_a_row_gives_two_samples_of_one_prompt_the_chosen_one_first(tmp_path, tokenizer):
    rows = [{"question": "1?", "chosen": "3 + 4 = 7", "rejected": "I guess 9", "step": 3}]
    rows += [{"question": "2?", "chosen": assistant("1 + 1 = 2"), "rejected": assistant("I guess 2")}]
    samples = load(tmp_path, tokenizer, rows, PAIR)
    assert [sample.response_text for sample in samples] == ["3 + 4 = 7", "I guess 9", "1 + 1 = 2", "I guess 2"]
    assert [(sample.group_id, sample.index) for sample in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for sample in samples:
        assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == sample.response_text + "<|im_end|>"
        assert sample.token_ids[: sample.prompt_length].tolist() == sample.prompt.token_ids
    assert samples[0].prompt is samples[1].prompt and set(samples[1].prompt.metadata) == {"step", "source"}


def test_all_wrong_responses_are_named(tmp_path, tokenizer):
    wrong = [user("2"), assistant("2") * 2, assistant(None), assistant("2", name="x"), "", "2<|im_end|>"]
    rows = [{"question": "1?", "reply": "2"}, {"question": "1?", "level": 2}, {"question": "", "reply": "2"}]
    rows += [{"question": "1" * 25, "reply": "2"}, *({"question": "1?", "reply": reply} for reply in wrong)]
    lines = refused(tmp_path, tokenizer, rows, ONE, response_key="reply", max_prompt_tokens=32)
    assert lines[0] == "2: no column reply, or null in it (data.response_key); columns: question, level"
    assert lines[1].startswith("3: question: ") and lines[2] == "4: question: 33 tokens > data.max_prompt_tokens=32"
    for number, line in enumerate(lines[3:8], start=5):
        assert line.startswith(f"{number}: reply: wanted a non-empty string or a list of one assistant message"), line
    assert lines[8:] == ["10: reply: contains <|im_end|>, which is appended anyway: remove it"]


def test_a_response_with_the_bos_token_is_refused(tmp_path, folder):
    tokenizer = chat.load_tokenizer(folder / "model")
    tokenizer.bos_token = "<|endoftext|>"
    lines = refused(tmp_path, tokenizer, [{"question": "1?", "response": "2<|endoftext|>"}], ONE)
    assert lines == ["1: response: contains <|endoftext|>, the tokenizer's BOS: remove it"]


def test_all_wrong_pairs_are_named_with_their_columns(tmp_path, tokenizer):
    rows = [{"question": "1?", "good": "2", "bad": "3"}, {"question": "1?", "good": "2"}, {"good": "2", "bad": "3"}]
    rows += [{"question": "1?", "good": "2", "bad": assistant("2")}, {"question": "1?", "good": "2", "bad": "1" * 20}]
    rows += [{"question": "1?", "good": " ", "bad": "<|im_end|>"}]
    lines = refused(tmp_path, tokenizer, rows, PAIR, context_length=29, chosen_key="good", rejected_key="bad")
    too_long = "5: bad: 31 tokens with the prompt > 29, the room in the model's context"
    missing = "2: no column bad, or null in it (data.rejected_key); columns: question, good"
    starts = [missing, "3: no column question", "4: good, bad: the same text", too_long, "6: good: wanted"]
    for line, start in zip(lines, [*starts, "6: bad: contains"], strict=True):
        assert line.startswith(start), line


def test_a_row_that_fills_the_context_is_taken_and_a_longer_one_refused(tmp_path, tokenizer):
    rows = [{"question": "1" * 12, "response": "12"}]
    assert len(load(tmp_path, tokenizer, rows, ONE, context_length=23)) == 1
    too_long = "1: response: 23 tokens with the prompt > 22, the room in the model's context"
    assert refused(tmp_path, tokenizer, rows, ONE, context_length=22) == [too_long]


def test_the_toys_preferences_load(folder, tokenizer):
    settings = DataConfig(train="unused", prompt_key="question", max_prompt_tokens=64)
    for name, num_pairs in (("preferences", 4096), ("preferences_validation", 512)):
        assert len(load_responses(folder / f"{name}.jsonl", settings, tokenizer, 256, PAIR)) == 2 * num_pairs


def test_a_sample_with_a_score_token_trains_the_place_after_its_last_token_alone():
    sample = Sample.from_response(Prompt([], [5, 6]), [7, 2], group_id=4, index=9)
    sample.ref_logprobs = torch.zeros(4)
    longer = with_score_token(sample)
    assert longer.token_ids.tolist() == [5, 6, 7, 2, 2] and longer.loss_mask.tolist() == [False] * 4 + [True]
    assert (longer.group_id, longer.index, longer.prompt_length) == (4, 9, 2) and longer.prompt is sample.prompt
    assert longer.ref_logprobs is None and sample.loss_mask.tolist() == [False, False, True, True]
