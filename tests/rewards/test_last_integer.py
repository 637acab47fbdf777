"""The rule of the toy task."""

import pytest

from megarl.rewards.last_integer import last_integer
from megarl.sample import Prompt, Sample, Status


def reward(response, gold, status=Status.COMPLETED):
    prompt = Prompt(messages=[], token_ids=[1], answer=gold)
    return last_integer(Sample.from_response(prompt, [2], group_id=0, index=0, response_text=response, status=status))


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        ("3 + 4 = 7", "7", 1.0),
        ("I guess 7", "7", 1.0),
        ("7 + 4 = 11", "7", 0.0),
        ("17", "7", 0.0),
        ("07", "7", 1.0),
        ("7-3", "3", 1.0),
        ("it is -3", "-3", 1.0),
        ("it is -3", "3", 0.0),
        ("7 or 3.5", "5", 0.0),
        ("7 or 3.5", "7", 0.0),
        ("1,234", "234", 0.0),
        ("7.", "7", 1.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
        ("9" * 10_000, "7", 0.0),
        ("7", "7.0", 1.0),
    ],
)
def test_the_last_number_decides(response, gold, expected):
    assert reward(response, gold) == expected


@pytest.mark.parametrize("status", [Status.TRUNCATED, Status.ABORTED])
def test_a_reply_that_did_not_end_by_itself_gets_0(status):
    assert reward("3 + 4 = 7", "7", status) == 0.0


@pytest.mark.parametrize("gold", [None, "", "seven", "7.5", "NaN", "Infinity"])
def test_a_gold_that_is_no_integer_is_an_error_and_not_a_0(gold):
    with pytest.raises(ValueError, match="answer"):
        reward("7", gold)
