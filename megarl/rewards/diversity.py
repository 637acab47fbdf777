"""A penalty for near-equal responses to one prompt: against collapse into one answer."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from megarl.sample import Sample

MAX_CHARACTERS = 4000  # of a response that are compared: 64 of them take 0.2 s, and with twice as many 0.6 s
ROUNDING = 1e-6  # edits: of 5 characters 0.8 lets one differ, but (1 - 0.8) * 5 is below 1


def diversity(
    samples: list["Sample"],
    *,
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9,
    penalty: Annotated[float, Field(gt=0)] = 1.0,
) -> list[float]:
    """For each sample -penalty * the share of the other responses of its group that are near-equal to its own; 0.0 for
    one that is alone in its group.

    Near-equal: 1 - edit distance (Levenshtein) / characters of the longer one is at least `threshold`. Neither case
    nor white space makes a difference, and of a response above MAX_CHARACTERS half as many at each end are compared.
    A group that has collapsed wholly has equal values, so advantages within the group only see a collapse while it
    comes.
    """
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    values = [0.0] * len(samples)
    for indices in groups.values():
        num_near = count_near_equal([comparable(samples[index].response_text) for index in indices], threshold)
        for index, number in zip(indices, num_near, strict=True):
            values[index] = penalty * -number / max(len(indices) - 1, 1)
    return values


def comparable(text: str) -> str:
    text = " ".join(text.casefold().split())
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else text[:half] + text[-half:]


def count_near_equal(texts: list[str], threshold: float) -> list[int]:
    """For each text, how many of the others are near-equal to it."""
    import numpy as np
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    counts = Counter(texts)  # equal texts take longest to compare, and are the usual case
    distinct = list(counts)
    lengths = [len(text) for text in distinct]
    limits = (1 - threshold) * np.maximum.outer(lengths, lengths) + ROUNDING
    distances = cdist(distinct, distinct, scorer=Levenshtein.distance, score_cutoff=int(limits.max()))
    num_near = dict(zip(distinct, (distances <= limits) @ list(counts.values())))
    return [int(num_near[text]) - 1 for text in texts]
