"""The soft overlong punishment as a part of the reward, so that it is weighted, normalized and logged like the others;
`algorithm.overlong.penalty` takes the same off the sum."""

from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, ValidationInfo

if TYPE_CHECKING:
    from megarl.sample import Sample


def check_buffer(buffer_tokens: int, info: ValidationInfo) -> int:
    max_tokens = info.data.get("max_tokens", buffer_tokens)  # absent where it is itself wrong
    if buffer_tokens > max_tokens:
        raise ValueError(f"max_tokens is {max_tokens}; valid: 1 to {max_tokens}")
    return buffer_tokens


def overlong(
    sample: "Sample",
    *,
    max_tokens: Annotated[int, Field(ge=1)],
    buffer_tokens: Annotated[int, Field(ge=1), AfterValidator(check_buffer)],
) -> float:
    """0.0 for a response of up to max_tokens - buffer_tokens tokens, from there falling linearly to -1.0 at max_tokens,
    and no further.

    DAPO (arXiv:2503.14476), section 3.4, equation 13. `max_tokens` is usually rollout.sampling.max_new_tokens.
    """
    from megarl.algorithms.shaping import overlong_penalties

    return overlong_penalties([sample], max_tokens, buffer_tokens, penalty=1.0)[0]
