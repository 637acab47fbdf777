"""Packed batches without a model, for tests of losses."""

import torch

from megarl.sample import Batch


def make_batch(lengths, num_loss_tokens, num_sequences, loss_mask=None, **fields):
    """A packed batch of sequences of these lengths; every token is trained unless a mask is given."""
    T = sum(lengths)
    return Batch(
        token_ids=torch.zeros(T, dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_seqlen=max(lengths),
        loss_mask=torch.ones(T, dtype=torch.bool) if loss_mask is None else torch.tensor(loss_mask),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        **fields,
    )
