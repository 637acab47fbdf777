"""A reward for a range of lengths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.rewards import options_model
from megarl.rewards.length import length
from megarl.sample import Prompt, Sample


def reward(num_tokens, **options):
    prompt = Prompt(messages=[], token_ids=[1] * 7)
    return length(Sample.from_response(prompt, [2] * num_tokens, group_id=0, index=0), **options)


@pytest.mark.parametrize(
    "num_tokens, options, expected",
    [
        (0, {"high": 10}, 0.0),
        (10, {"high": 10}, 0.0),
        (11, {"high": 10}, -0.01),
        (60, {"high": 10}, -0.5),
        (110, {"high": 10}, -1.0),
        (1000, {"high": 10}, -1.0),
        (14, {"high": 10, "slope_tokens": 16}, -0.25),
        (11, {"high": 10, "slope_tokens": 1}, -1.0),
        (0, {"high": 0}, 0.0),
        (20, {"low": 20, "high": None}, 0.0),
        (1000, {"low": 20, "high": None}, 0.0),
        (18, {"low": 20, "high": None, "slope_tokens": 8}, -0.25),
        (12, {"low": 20, "high": None, "slope_tokens": 8}, -1.0),
        (0, {"low": 20, "high": None, "slope_tokens": 8}, -1.0),
        (0, {"low": 20, "high": None}, -0.2),
        (5, {"low": 5, "high": 5, "slope_tokens": 4}, 0.0),
        (4, {"low": 5, "high": 5, "slope_tokens": 4}, -0.25),
        (6, {"low": 5, "high": 5, "slope_tokens": 4}, -0.25),
    ],
)
def test_values_worked_by_hand(num_tokens, options, expected):
    assert reward(num_tokens, **options) == expected
    assert options_model(length).model_validate(options)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60), st.integers(1, 60))
def test_a_token_nearer_to_the_range_is_never_worse(num_tokens, low, width, slope_tokens):
    options = {"low": low, "high": low + width, "slope_tokens": slope_tokens}
    value, longer = reward(num_tokens, **options), reward(num_tokens + 1, **options)
    assert -1.0 <= value <= 0.0
    assert (value == 0.0) == (low <= num_tokens <= low + width)
    assert longer >= value if num_tokens < low else longer <= value


@pytest.mark.parametrize(
    "options, key, message",
    [
        ({}, "high", "Field required"),
        ({"high": None}, "high", "low is 0: every length is in the range; valid: a number, or low > 0"),
        ({"low": 5, "high": 4}, "high", "low is 5: no length is in the range; valid: null, or 5 and more"),
        ({"low": -1, "high": -3}, "low", "greater than or equal to 0"),
        ({"high": -1}, "high", "low is 0: no length is in the range; valid: null, or 0 and more"),
        ({"high": 1.5}, "high", "valid integer"),
        ({"high": 10, "slope_tokens": 0}, "slope_tokens", "greater than or equal to 1"),
    ],
)
def test_ranges_without_a_meaning_are_refused(options, key, message):
    with pytest.raises(ValidationError) as caught:
        options_model(length).model_validate(options)
    [detail] = caught.value.errors()
    assert detail["loc"] == (key,) and message in detail["msg"]
