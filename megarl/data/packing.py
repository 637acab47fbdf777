"""Samples -> packed micro-batches under a token budget: pack first, distribute second, nothing dropped or repeated."""

import torch

from megarl.sample import Batch, Sample


def plan_microbatches(lengths: list[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """For each data-parallel rank its micro-batches, each a list of sample indices; every rank gets equally many.

    First-fit decreasing under `max_tokens`; a sample longer than that is a micro-batch of its own. Micro-batches are
    then dealt to the ranks, the largest first and always to the rank with the fewest tokens. Where there are fewer
    samples than ranks some micro-batches are empty: their rank still takes part in every collective.
    """
    bins: list[list[int]] = []
    totals: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((b for b, total in enumerate(totals) if total + lengths[index] <= max_tokens), None)
        if place is None:
            bins.append([index])
            totals.append(lengths[index])
        else:
            bins[place].append(index)
            totals[place] += lengths[index]
    while not bins or len(bins) % num_ranks:
        halves = [_deal(b, lengths, 2) for b in bins]
        best = max(range(len(bins)), key=lambda b: min(_tokens(half, lengths) for half in halves[b]), default=None)
        if best is None or not halves[best][1]:
            bins.append([])
        else:
            bins[best : best + 1] = halves[best]
    return _deal_equally(bins, lengths, num_ranks)


def _tokens(indices: list[int], lengths: list[int]) -> int:
    return sum(lengths[i] for i in indices)


def _deal(indices: list[int], lengths: list[int], num_parts: int) -> list[list[int]]:
    """Longest first, each to the part with the fewest tokens."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index in sorted(indices, key=lambda i: -lengths[i]):
        min(parts, key=lambda part: _tokens(part, lengths)).append(index)
    return parts


def _deal_equally(bins: list[list[int]], lengths: list[int], num_ranks: int) -> list[list[list[int]]]:
    tokens = [_tokens(b, lengths) for b in bins]
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for b in sorted(range(len(bins)), key=lambda b: -tokens[b]):
        rank = min((r for r in range(num_ranks) if len(ranks[r]) < len(bins) // num_ranks), key=lambda r: loads[r])
        ranks[rank].append(bins[b])
        loads[rank] += tokens[b]
    return ranks


def count_denominators(samples: list[Sample]) -> tuple[int, int]:
    """(trained tokens, sequences with at least one trained token) of a whole optimizer step."""
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    return sum(counts), sum(count > 0 for count in counts)


def pack(
    samples: list[Sample], num_loss_tokens: int, num_sequences: int, device: torch.device, multiple_of: int = 1
) -> Batch:
    """One micro-batch on `device`. A last sequence that is not trained fills it up to a multiple of `multiple_of` tokens,
    which sequence parallelism needs, and to one such multiple where there are no samples."""
    lengths = [len(sample.token_ids) for sample in samples]
    padding = -sum(lengths) % multiple_of if samples else multiple_of
    if padding:
        lengths.append(padding)

    def joined(name: str, dtype: torch.dtype) -> torch.Tensor | None:
        values = [getattr(sample, name) for sample in samples]
        missing = sum(value is None for value in values)
        assert missing in (0, len(values)), f"{missing} of {len(values)} samples of a micro-batch lack {name}"
        return None if missing else torch.cat([*values, torch.zeros(padding, dtype=dtype)]).to(device)

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
    )
