"""A reward for random weights: without differences within a group nothing would be trained, and no update measured."""

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.sample import Sample


def coin(sample: "Sample") -> float:
    """1.0 for about half of all responses, by a checksum of their tokens."""
    return float(zlib.crc32(sample.token_ids.numpy().tobytes()) & 1)
