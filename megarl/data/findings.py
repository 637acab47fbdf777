"""What a check of the data hands back, and the numbers and lines that it is made of."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

Verdict = Literal["ok", "look", "bad"]
NUM_EXAMPLES = 3
NUM_BINS = 10
BAR_WIDTH = 40
QUOTE_WIDTH = 60


@dataclass(frozen=True)
class Check:
    name: str
    verdict: Verdict
    finding: str  # the number that decides
    limits: str
    details: tuple[str, ...] = ()  # lines: counts, a histogram, examples


@dataclass(frozen=True)
class Limits:
    """Shares above which a check is not ok."""

    look: float = math.inf
    bad: float = math.inf

    def judge(self, share: float) -> Verdict:
        return "bad" if share > self.bad else "look" if share > self.look else "ok"

    def __str__(self) -> str:
        limits = {"look": self.look, "bad": self.bad}
        return ", ".join(f"{name} > {100 * x:g}{'%' * (x > 0)}" for name, x in limits.items() if x < math.inf)


def by_share(
    name: str, what: str, examples: list[str], total: int, limits: Limits, details: tuple[str, ...] = ()
) -> Check:
    """A check that is judged by the share of `examples`, one for each finding, in `total`."""
    share = len(examples) / max(total, 1)
    finding = f"{len(examples):,} of {total:,} {what}" + (f" ({percent(share)})" if examples else "")
    return Check(name, limits.judge(share), finding, str(limits), details + first_of(examples, NUM_EXAMPLES))


def first_of(lines: list[str], limit: int) -> tuple[str, ...]:
    left_out = (f"... and {len(lines) - limit:,} more",) if len(lines) > limit else ()
    return (*lines[:limit], *left_out)


def percent(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.001 else f"{100 * share:.1f}%"


def quote(text: str, place: int = 0) -> str:
    """The text around a place, on one line, as Python writes it: what cannot be seen is escaped."""
    start = max(place - QUOTE_WIDTH // 2, 0)
    end = start + QUOTE_WIDTH
    return "..." * (start > 0) + repr(text[start:end]) + "..." * (end < len(text))


def fences(lengths: list[int]) -> tuple[int, int]:
    """The bounds outside of which a length is far from the others: Tukey's outer fences, three times the distance of
    the quartiles away from them, on a logarithmic scale, as lengths differ by factors.

    Ten is added to each length, and quartiles are taken to be a factor of 1.5 apart at least: among short or equal ones
    a slightly longer one is not far.
    """
    if not lengths:
        return 0, 0
    first, third = np.percentile(np.log(np.array(lengths) + 10.0), [25, 75])
    distance = 3 * max(third - first, math.log(1.5))
    return max(round(math.exp(first - distance) - 10), 0), round(math.exp(third + distance) - 10)


def distribution(lengths: list[int], unit: str) -> tuple[str, ...]:
    """Percentiles and a histogram."""
    if not lengths:
        return ()
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
    line = f"{unit}: min {min(lengths):,}, p50 {p50:,}, p90 {p90:,}, p99 {p99:,}, max {max(lengths):,}"
    return (line, *histogram(lengths))


def histogram(values: list[int] | list[float]) -> tuple[str, ...]:
    """A line with a bar per value; where there are many, per range up to the 99th percentile, and for what is above."""
    counted = Counter(values)
    if len(counted) > NUM_BINS:
        bars = _ranges(np.array(values))
    else:
        bars = [(f"{value:,g}", counted[value]) for value in sorted(counted)]
    width, largest = max(len(name) for name, _ in bars), max(count for _, count in bars)
    return tuple(
        f"{name:>{width}} {'#' * math.ceil(BAR_WIDTH * count / largest):{BAR_WIDTH}} {count:,}" for name, count in bars
    )


def _ranges(values: np.ndarray) -> list[tuple[str, int]]:
    """(range, number of values); integers include the upper end, of other numbers only the last range does."""
    low, high = values.min(), np.percentile(values, 99, method="higher")
    if values.dtype.kind == "i":
        step = math.ceil((high - low + 1) / NUM_BINS)
        edges = np.arange(low, high + step + 1, step)
        names = [f"{a:,} to {min(a + step - 1, high):,}" if step > 1 else f"{a:,}" for a in edges[:-1]]
        above = f"above {high:,}"
    else:
        edges = np.linspace(low, high, NUM_BINS + 1 if high > low else 2)
        names = [f"{a:.3g} to {b:.3g}" for a, b in itertools.pairwise(edges)]
        above = f"above {high:.3g}"
    counts, _ = np.histogram(values[values <= high], edges)
    num_above = int((values > high).sum())
    return [*zip(names, counts.tolist()), *([(above, num_above)] if num_above else [])]
