"""Rows of two responses to pairs of samples, and sequences with a place for their score."""

import json

import pytest
import torch

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.preferences import load_pairs, scored
from megarl.errors import ConfigError
from megarl.sample import Prompt, Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return chat.load_tokenizer(folder / "model")


def load(tmp_path, tokenizer, rows, **arguments):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_pairs(path, DataConfig(train="unused", prompt_key="question"), tokenizer, **arguments)


def assistant(text):
    return [{"role": "assistant", "content": text}]


def test_a_row_gives_two_samples_of_one_prompt_the_chosen_one_first(tmp_path, tokenizer):
    rows = [{"question": "1?", "chosen": "3 + 4 = 7", "rejected": "I guess 9", "step": 3}]
    rows += [{"question": "2?", "chosen": assistant("1 + 1 = 2"), "rejected": assistant("I guess 2")}]
    samples = load(tmp_path, tokenizer, rows)
    assert [sample.response_text for sample in samples] == ["3 + 4 = 7", "I guess 9", "1 + 1 = 2", "I guess 2"]
    assert [(sample.group_id, sample.index) for sample in samples] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    for sample in samples:
        assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == sample.response_text + "<|im_end|>"
        assert sample.token_ids[: sample.prompt_length].tolist() == sample.prompt.token_ids
    assert samples[0].prompt is samples[1].prompt and samples[1].prompt.metadata["step"] == 3


def test_all_wrong_rows_are_named_with_their_keys(tmp_path, tokenizer):
    rows = [{"question": "1?", "good": "2", "bad": "3"}, {"question": "1?", "good": "2"}, {"good": "2", "bad": "3"}]
    rows += [{"question": "1?", "good": "2", "bad": assistant("2")}, {"question": "1?", "good": "2", "bad": "1" * 20}]
    rows += [{"question": "1?", "good": " ", "bad": "<|im_end|>"}]
    with pytest.raises(ConfigError, match=r"6 error\(s\)") as error:
        load(tmp_path, tokenizer, rows, context_length=29, chosen_key="good", rejected_key="bad")
    lines = [line.partition("pairs.jsonl:")[2] for line in str(error.value).splitlines()[1:]]
    too_long = "5: bad: 31 tokens with the prompt > the model's context of 29"
    starts = ["2: bad: wanted", "3: no column question", "4: good, bad: the same text", too_long, "6: good: wanted"]
    for line, start in zip(lines, [*starts, "6: bad: contains"], strict=True):
        assert line.startswith(start), line


def test_the_toys_preferences_load(folder, tokenizer):
    settings = DataConfig(train="unused", prompt_key="question", max_prompt_tokens=64)
    for name, num_pairs in (("preferences", 4096), ("preferences_validation", 512)):
        samples = load_pairs(folder / f"{name}.jsonl", settings, tokenizer, context_length=256)
        assert len(samples) == 2 * num_pairs


def test_a_scored_sample_trains_the_place_after_its_last_token_alone():
    sample = Sample.from_response(Prompt([], [5, 6]), [7, 2], group_id=4, index=9)
    sample.ref_logprobs = torch.zeros(4)
    longer = scored(sample)
    assert longer.token_ids.tolist() == [5, 6, 7, 2, 2] and longer.loss_mask.tolist() == [False] * 4 + [True]
    assert (longer.group_id, longer.index, longer.prompt_length) == (4, 9, 2) and longer.prompt is sample.prompt
    assert longer.ref_logprobs is None and sample.loss_mask.tolist() == [False, False, True, True]
