"""How far the length of a response is from a range of lengths: against answers too short, too long, or both."""

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationInfo

if TYPE_CHECKING:
    from megarl.sample import Sample


def check_range(high: int | None, info: ValidationInfo) -> int | None:
    if "low" not in info.data:  # it is wrong itself
        return high
    low = info.data["low"]
    if high is None and low == 0:
        raise ValueError("low is 0: every length is in the range; valid: a number, or low > 0")
    if high is not None and high < low:
        raise ValueError(f"low is {low}: no length is in the range; valid: null, or {low} and more")
    return high


def length(
    sample: "Sample",
    *,
    low: Annotated[int, Field(ge=0)] = 0,
    high: Annotated[int | None, AfterValidator(check_range)],
    slope_tokens: Annotated[int, Field(ge=1)] = 100,
) -> float:
    """0.0 for a response of `low` to `high` tokens, both included, the one that ends the turn counted; outside it falls
    linearly, to -1.0 where `slope_tokens` are missing or too many, and no further.

    Not too long: {high: 800}. Not too short: {low: 50, high: null}, null for no limit. With `slope_tokens` above `low`
    an empty response gets more than -1.0.
    """
    num_tokens = sample.response_length
    excess = 0 if high is None else num_tokens - high
    return max(-max(low - num_tokens, excess, 0) / slope_tokens, -1.0)
