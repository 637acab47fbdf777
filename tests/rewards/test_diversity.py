"""A penalty for near-equal responses in a group."""

import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.rewards import options_model
from megarl.rewards.diversity import MAX_CHARACTERS, diversity
from megarl.sample import Prompt, Sample

TEN = "abcdefghij"
TEXTS = st.lists(st.tuples(st.integers(0, 3), st.text("ab ", max_size=12)), max_size=10)  # (group, response)


def samples_with(*groups):
    """Samples of one group for each list of responses."""
    prompt, texts = Prompt([], [1]), [(group_id, text) for group_id, group in enumerate(groups) for text in group]
    return [
        Sample.from_response(prompt, [2], group_id=group_id, index=index, response_text=text)
        for index, (group_id, text) in enumerate(texts)
    ]


@pytest.mark.parametrize(
    "responses, options, expected",
    [
        ([], {}, []),
        (["alone"], {}, [0.0]),
        (["same", "same"], {}, [-1.0, -1.0]),
        (["same", "different"], {}, [0.0, 0.0]),
        (["same", "same", "different"], {}, [-0.5, -0.5, 0.0]),
        (["same"] * 4 + ["different"], {"penalty": 2.0}, [-1.5] * 4 + [0.0]),
        (["one", "one", "two words", "two words", "three"], {}, [-0.25] * 4 + [0.0]),
        (["SO  IT\nis 18", " so it is 18 "], {}, [-1.0, -1.0]),
        (["", " "], {}, [-1.0, -1.0]),
        (["", "x"], {}, [0.0, 0.0]),
        ([TEN, "abcdefghix"], {}, [-1.0, -1.0]),  # 1 - 1/10
        ([TEN, "abcdefghxx"], {}, [0.0, 0.0]),  # 1 - 2/10
        ([TEN, "abcdefghxx"], {"threshold": 0.8}, [-1.0, -1.0]),
        ([TEN, "abcdefghi"], {}, [-1.0, -1.0]),
        ([TEN, "abcdefgh"], {}, [0.0, 0.0]),
        (["aaaab", "aaaaa"], {"threshold": 0.8}, [-1.0, -1.0]),  # (1 - 0.8) * 5 is rounded to below 1
        ([TEN, "abcdefghix"], {"threshold": 1.0}, [0.0, 0.0]),
        ([TEN, "abcdefghiX", "abcdefghYX"], {}, [-0.5, -1.0, -0.5]),  # near-equal does not carry over
        (["#### 18", "#### 19"], {}, [0.0, 0.0]),  # 1 - 1/7
        (["\ud800" * 10, "\ud800" * 9], {}, [-1.0, -1.0]),
    ],
)
def test_values_worked_by_hand(responses, options, expected):
    assert diversity(samples_with(responses), **options) == expected


def test_only_a_samples_own_group_counts():
    assert diversity(samples_with(["x", "x", "y"], ["x", "z"], ["x"])) == [-0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_of_a_long_response_both_ends_count():
    half = MAX_CHARACTERS // 2
    draw = random.Random(0)
    start, middle, other, end, end2 = ("".join(draw.choices(string.ascii_lowercase, k=half)) for _ in range(5))
    assert diversity(samples_with([start + middle + end, start + other + end])) == [-1.0, -1.0]
    assert diversity(samples_with([start + middle + end, start + middle + end2])) == [0.0, 0.0]


@settings(deadline=None, max_examples=100)
@given(TEXTS, st.randoms(use_true_random=False), st.floats(0.3, 1.0))
def test_values_follow_their_samples_through_any_order(texts, draw, threshold):
    prompt = Prompt([], [1])
    samples = [
        Sample.from_response(prompt, [2], group_id=group_id, index=index, response_text=text)
        for index, (group_id, text) in enumerate(texts)
    ]
    values = dict(zip(range(len(samples)), diversity(samples, threshold=threshold)))
    assert all(-1.0 <= value <= 0.0 for value in values.values())
    draw.shuffle(samples)
    assert diversity(samples, threshold=threshold) == [values[sample.index] for sample in samples]


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters()), st.integers(2, 8), st.floats(0.1, 10.0))
def test_a_group_of_equal_responses_gets_the_whole_penalty(text, group_size, penalty):
    values = diversity(samples_with([text] * group_size), penalty=penalty)
    assert values == pytest.approx([-penalty] * group_size)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from(string.ascii_lowercase), unique=True), st.integers(1, 50))
def test_a_group_of_different_responses_gets_nothing(letters, num_letters):
    assert diversity(samples_with([letter * num_letters for letter in letters])) == [0.0] * len(letters)


@pytest.mark.parametrize("options", [{"threshold": 0.0}, {"threshold": 1.1}, {"penalty": 0.0}, {"penalty": -1.0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValidationError):
        options_model(diversity).model_validate(options)
