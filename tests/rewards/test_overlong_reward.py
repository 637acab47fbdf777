"""DAPO's soft overlong punishment as a reward."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from megarl.rewards import options_model
from megarl.rewards.overlong import overlong
from megarl.sample import Prompt, Sample


def reward(num_tokens, max_tokens, buffer_tokens):
    prompt = Prompt(messages=[], token_ids=[1] * 7)
    sample = Sample.from_response(prompt, [2] * num_tokens, group_id=0, index=0)
    return overlong(sample, max_tokens=max_tokens, buffer_tokens=buffer_tokens)


@pytest.mark.parametrize(
    "num_tokens, max_tokens, buffer_tokens, expected",
    [
        (0, 20, 4, 0.0),
        (16, 20, 4, 0.0),
        (17, 20, 4, -0.25),
        (19, 20, 4, -0.75),
        (20, 20, 4, -1.0),
        (25, 20, 4, -1.0),
        (0, 4, 4, 0.0),
        (1, 4, 4, -0.25),
        (19, 20, 1, 0.0),
        (20, 20, 1, -1.0),
    ],
)
def test_equation_13_worked_by_hand(num_tokens, max_tokens, buffer_tokens, expected):
    assert reward(num_tokens, max_tokens, buffer_tokens) == expected


@pytest.mark.parametrize(
    "options, key, message",
    [
        ({"max_tokens": 4, "buffer_tokens": 5}, "buffer_tokens", "max_tokens is 4; valid: 1 to 4"),
        ({"max_tokens": 4, "buffer_tokens": 0}, "buffer_tokens", "greater than or equal to 1"),
        ({"max_tokens": 0, "buffer_tokens": 5}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 4}, "buffer_tokens", "Field required"),
    ],
)
def test_a_buffer_outside_of_the_limit_is_refused(options, key, message):
    with pytest.raises(ValidationError) as caught:
        options_model(overlong).model_validate(options)
    [detail] = caught.value.errors()
    assert detail["loc"] == (key,) and message in detail["msg"]


def test_importing_it_loads_no_torch():
    code = "import sys, megarl.rewards.overlong; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
