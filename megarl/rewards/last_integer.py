"""The rule of the toy task: the reply ended by itself, and its last number is the answer."""

import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from megarl.rewards.gsm8k import number_text

if TYPE_CHECKING:
    from megarl.sample import Sample

NUMBER = re.compile(r"(?<![0-9])-?[0-9]+(?:[.,][0-9]+)*")  # the minus of 7-3 is no sign


def last_integer(sample: "Sample") -> float:
    """1.0 if the last number in the response is an integer, equals the answer, and the status is COMPLETED; else 0.0.

    Raises ValueError where the reference answer is missing or is no integer: that is a fault of the data.
    """
    from megarl.sample import Status

    answer = sample.prompt.answer
    if answer is None:
        raise ValueError("the prompt has no answer (data.answer_key)")
    try:
        gold = Decimal(answer)
    except InvalidOperation as error:
        raise ValueError(f"the answer {answer[-80:]!r} is no integer") from error
    if not gold.is_finite() or gold != gold.to_integral_value():
        raise ValueError(f"the answer {answer[-80:]!r} is no integer")

    numbers = NUMBER.findall(sample.response_text)
    if sample.status is not Status.COMPLETED or not numbers:
        return 0.0
    last = numbers[-1]
    is_integer = "." not in last and "," not in last
    return float(is_integer and Decimal(last) == gold)


def answer_of(response: str) -> str | None:
    """The last number, in one form where it is an integer."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return None
    last = numbers[-1]
    return last if "." in last or "," in last else number_text(Decimal(last))
