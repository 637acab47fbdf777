"""Whether a response ended by itself: a part beside a reward for its content."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.sample import Sample


def completed(sample: "Sample") -> float:
    """1.0 if the model ended its turn, 0.0 if the response was cut."""
    from megarl.sample import Status

    return float(sample.status is Status.COMPLETED)
