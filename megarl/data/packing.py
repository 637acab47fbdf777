"""Samples -> packed micro-batches under a token budget: pack first, distribute second, nothing dropped or repeated."""

import heapq
import math
from collections.abc import Sequence

import numpy as np
import torch

from megarl.sample import Batch, Sample


def plan_microbatches(
    lengths: list[int],
    max_tokens: int,
    num_ranks: int,
    costs: list[float] | None = None,
    count_multiple: int = 1,
    unit: int = 1,
) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches, each a list of sample indices; every rank gets equally many.

    First-fit decreasing under `max_tokens`; a sample longer than that is a micro-batch of its own. Micro-batches are
    then dealt to the ranks, the costliest first and always to the rank with the lowest sum of `costs` (one per sample;
    None: the lengths). Their number per rank is a multiple of `count_multiple`, which interleaved pipelines need: large
    ones are split for that. Where there are fewer samples than micro-batches some are empty: their rank still takes
    part in every collective. Each `unit` samples in a row are treated as one: 2 keeps pairs side by side, in order.
    """
    costs = lengths if costs is None else costs
    assert len(costs) == len(lengths), f"{len(costs)} costs for {len(lengths)} samples"
    assert len(lengths) % unit == 0, f"{len(lengths)} samples in units of {unit}"
    units = [range(first, first + unit) for first in range(0, len(lengths), unit)]
    lengths, costs = ([sum(of_samples[i] for i in indices) for indices in units] for of_samples in (lengths, costs))
    bins = _split_until_multiple(_first_fit_decreasing(lengths, max_tokens), costs, num_ranks * count_multiple)
    bin_costs = [sum(costs[u] for u in members) for members in bins]
    dealt = _deal(range(len(bins)), bin_costs, num_ranks, len(bins) // num_ranks)
    return [[[i for u in bins[b] for i in units[u]] for b in rank] for rank in dealt]


def _first_fit_decreasing(lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free = np.full(len(lengths), max_tokens)  # tokens; of the bins that are not begun yet too
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = min(lengths[index], max_tokens)  # an oversize sample fills a bin
        place = int(np.argmax(free[: len(bins) + 1] >= length))
        if place == len(bins):
            bins.append([])
        bins[place].append(index)
        free[place] -= length
    return bins


def _split_until_multiple(bins: list[list[int]], costs: list[float], multiple: int) -> list[list[int]]:
    """Always in two the bin whose smaller half is largest; empty bins where none can be split."""

    def entry(indices: list[int]) -> tuple:
        halves = _deal(indices, costs, 2, len(indices))
        smaller = min(sum(costs[i] for i in half) for half in halves)
        return not all(halves), -smaller, indices, halves

    queue = [entry(indices) for indices in bins or [[]]]
    heapq.heapify(queue)
    while len(queue) % multiple:
        cannot_split, _, _, halves = queue[0]
        if cannot_split:
            heapq.heappush(queue, entry([]))
        else:
            heapq.heapreplace(queue, entry(halves[0]))
            heapq.heappush(queue, entry(halves[1]))
    return [indices for _, _, indices, _ in queue]


def _deal(items: Sequence[int], costs: Sequence[float], num_parts: int, most: int) -> list[list[int]]:
    """The costliest first, each to the part with the lowest cost among those with fewer than `most` items."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    queue = [(0, 0, part) for part in range(num_parts)]  # cost, items, part
    for item in sorted(items, key=lambda i: -costs[i]):
        cost, count, part = heapq.heappop(queue)
        parts[part].append(item)
        if count + 1 < most:
            heapq.heappush(queue, (cost + costs[item], count + 1, part))
    return parts


def count_denominators(samples: list[Sample]) -> tuple[int, int]:
    """(trained tokens, sequences with at least one trained token) of a whole optimizer step."""
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    return sum(counts), sum(count > 0 for count in counts)


def padded(length: int, multiple: int) -> int:
    """The next multiple from `length` on: what a sequence takes of the token budget."""
    return length + -length % multiple


def pack(
    samples: list[Sample],
    num_loss_tokens: int,
    num_sequences: int,
    device: torch.device,
    multiple_of: int = 1,
    sequence_multiple: int = 1,
    like: Sequence[Sample] = (),
) -> Batch:
    """One micro-batch on `device`, filled up with tokens that are not trained: id 0, and 0 in every per-token field.

    Each sequence is padded at its end to a multiple of `sequence_multiple`, which context parallelism needs (2 * CP);
    a causal mask hides the padding from the sequence's own tokens. A last sequence fills the whole up to a multiple of
    `multiple_of` too, which sequence parallelism needs (TP * CP). Without samples it is one such sequence, with the
    fields that the samples `like` have.
    """
    lengths = [padded(len(sample.token_ids), sequence_multiple) for sample in samples]
    multiple = math.lcm(multiple_of, sequence_multiple)
    filler = -sum(lengths) % multiple if samples else multiple
    if filler:
        lengths.append(filler)

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        values = [getattr(sample, name) for sample in samples or like]
        missing = sum(value is None for value in values)
        assert missing in (0, len(values)), f"{missing} of {len(values)} samples of a micro-batch lack {name}"
        if missing:
            return None
        flat = torch.zeros(sum(lengths), dtype=dtype)
        for place, value in zip(flat.split(lengths), values if samples else []):
            place[: len(value)] = value
        return flat.to(device)

    return Batch(
        token_ids=joined("token_ids", torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device),
        max_seqlen=max(lengths),
        loss_mask=joined("loss_mask", torch.bool),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device),
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        old_logprobs=joined("old_logprobs", torch.float32),
        ref_logprobs=joined("ref_logprobs", torch.float32),
        advantages=joined("advantages", torch.float32),
        values=joined("values", torch.float32),
        returns=joined("returns", torch.float32),
        weights=joined("weights", torch.float32),
    )
