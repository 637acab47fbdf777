"""Samples in a file are, read again, what they were: bit for bit."""

import dataclasses
import json
import math
import os
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import RunError
from megarl.sample import Prompt, Sample, Status
from megarl.sample_file import read_samples, write_samples

FLOATS = [field.name for field in dataclasses.fields(Sample) if field.type == torch.Tensor | None]
# Ends of lines to `str.splitlines`, what JSON escapes, and halves of characters, which alone are no text.
ODD = '\n\r\u2028\u2029\x85\x1c\x0b\0"\\\ud83d\udfff\ufeff😀ü '
texts = st.lists(st.sampled_from(list(ODD)) | st.characters(), max_size=9).map("".join)  # st.text drops the halves
# Two halves side by side are one character to JSON.
texts = texts.filter(lambda text: text == json.loads(json.dumps(text)))
numbers = st.one_of(st.floats(), st.integers(-5, 5))
float32 = st.floats(width=32)


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(1, 6))
    tokens = draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length))
    prompt_length = draw(st.integers(0, length))
    messages = [{"role": "user", "content": draw(texts), "parts": [1, None]}]
    source = f"{draw(texts)}:{draw(st.integers(1, 99))}"
    prompt = Prompt(messages, tokens[:prompt_length], draw(texts), {"source": source}, [{"name": draw(texts)}], 3)
    tensors = {}
    for name in FLOATS:
        values = draw(st.none() | st.lists(float32, min_size=length, max_size=length))
        tensors[name] = None if values is None else torch.tensor(values, dtype=torch.float32)
    return Sample(
        prompt=prompt,
        group_id=draw(st.integers(0, 2**60)),
        index=draw(st.integers(0, 999)),
        prompt_length=prompt_length,
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        loss_mask=torch.tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length))),
        response_text=draw(texts),
        status=draw(st.sampled_from(list(Status))),
        policy_version=(draw(st.integers(-1, 9)), draw(st.integers(-1, 9))),
        reward=draw(st.none() | numbers),
        reward_parts=draw(st.dictionaries(texts, numbers, max_size=3)),
        **tensors,
    )


def exactly(value) -> object:
    """Equal only for the same bits; all NaNs are one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), [exactly(number) for number in value.tolist()]
    if isinstance(value, float):
        return "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        return {key: exactly(item) for key, item in value.items()}
    return type(value), value


@settings(deadline=None, max_examples=60)
@given(st.lists(samples(), max_size=4))
def test_every_field_is_exactly_as_it_was(tmp_path_factory, written):
    file = tmp_path_factory.getbasetemp() / "samples.jsonl"
    write_samples(file, written)
    read = read_samples(file, lambda source, i: written[i].prompt)
    assert len(read) == len(written) == file.read_bytes().count(b"\n")
    for before, after in zip(written, read):
        assert after.prompt is before.prompt
        for field in dataclasses.fields(Sample)[1:]:
            assert exactly(getattr(after, field.name)) == exactly(getattr(before, field.name)), field.name


def test_the_fields_of_the_property_are_all_that_there_are():
    assert len(FLOATS) == 8 and {"rollout_logprobs", "weights"} <= set(FLOATS)


def sample(number: int, token: int = 7, file: str = "t") -> Sample:
    prompt = Prompt([], [number, token], metadata={"source": f"{file}:{number}"})
    return Sample.from_response(prompt, [9], group_id=number, index=number, response_text="nine")


def test_an_empty_file_is_no_samples(tmp_path):
    write_samples(tmp_path / "none", [])
    assert (tmp_path / "none").read_bytes() == b"" and read_samples(tmp_path / "none", None) == []


def test_another_prompt_or_other_tokens_are_refused_with_the_line(tmp_path):
    file = tmp_path / "samples.jsonl"
    write_samples(file, [sample(1), sample(2)])
    for second, message in (
        (sample(3), f"{file}:2: its prompt is from t:2, but here comes t:3: data have changed"),
        (sample(2, file="u"), f"{file}:2: its prompt is from t:2, but here comes u:2: data have changed"),
        (None, f"{file}:2: its prompt is from t:2, but here comes nothing: data have changed"),
        (sample(2, token=8), f"{file}:2: the prompt from t:2 has other tokens now: data or chat template have changed"),
    ):
        prompts = [sample(1).prompt, second and second.prompt]
        with pytest.raises(RunError) as error:
            read_samples(file, lambda source, i: prompts[i])
        assert str(error.value) == message


def test_a_prompt_may_keep_the_tokens_that_it_had(tmp_path):
    write_samples(tmp_path / "samples.jsonl", [sample(1)])
    now = sample(1, token=8).prompt
    (read,) = read_samples(tmp_path / "samples.jsonl", lambda source, i: now, same_tokens=False)
    assert read.prompt.token_ids == [1, 7] and now.token_ids == [1, 8] and read.prompt.metadata is now.metadata


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda line: line[:-20], "JSONDecodeError"),
        (lambda line: "", "JSONDecodeError"),
        (lambda line: "[]", "TypeError"),
        (lambda line: line.replace('"reward":', '"rewards":'), "KeyError: 'reward'"),
        (lambda line: line.replace('"source":', '"place":'), "KeyError: 'source'"),
        (lambda line: line.replace('"completed"', '"done"'), "ValueError: 'done' is not a valid Status"),
        (lambda line: line.replace("[true,", '["x",').replace("[false,", '["x",'), "ValueError"),
    ],
)
def test_a_broken_line_is_named(tmp_path, spoil, reason):
    file = tmp_path / "samples.jsonl"
    write_samples(file, [sample(1), sample(2)])
    first, second = file.read_text().splitlines()
    assert spoil(second) != second
    file.write_text(f"{first}\n{spoil(second)}\n")
    with pytest.raises(RunError, match=f"{file}:2: not a sample: {reason}"):
        read_samples(file, lambda source, i: sample(i + 1).prompt)


def test_a_file_that_was_not_finished_has_another_name(tmp_path):
    def some():
        yield sample(1)
        assert os.listdir(tmp_path) == ["samples.jsonl.partial"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_samples(tmp_path / "samples.jsonl", some())
    assert os.listdir(tmp_path) == ["samples.jsonl.partial"]
    write_samples(tmp_path / "samples.jsonl", [sample(1)])
    assert os.listdir(tmp_path) == ["samples.jsonl"]
