"""Context parallelism: a packed micro-batch cut over the CP ranks, and per-token results put together again.

Each sequence is cut into 2 x CP equal chunks; rank r holds chunk r and chunk 2 CP - 1 - r, so that a causal mask gives
every rank the same work (Llama 3, arXiv:2407.21783, section 3.3.2). It is the order that transformer-engine expects.
"""

from dataclasses import dataclass

import torch

from megarl.engine import parallel
from megarl.sample import Batch


@dataclass(frozen=True)
class Split:
    order: torch.Tensor | None  # [cp, T / cp] which tokens each rank holds; None: one rank holds all

    def mine(self, values_T: torch.Tensor) -> torch.Tensor:
        """[T] -> [T / cp] of this rank."""
        return values_T if self.order is None else values_T[self.order[parallel.context_parallel_rank()]]

    def whole(self, values: torch.Tensor) -> torch.Tensor:
        """[T / cp] of this rank -> [T], the same on every rank; each rank differentiates its own part."""
        return values if self.order is None else _Gather.apply(values, self.order)


def split(batch: Batch) -> Split:
    size = parallel.context_parallel_size()
    return Split(None if size == 1 else token_order(batch.cu_seqlens, batch.positions, batch.sequence_ids, size))


def token_order(cu_seqlens, positions_T, sequence_ids_T, size: int) -> torch.Tensor:
    """[size, T / size]: the tokens of each rank, in the order of the packed batch."""
    chunk_lengths_T = (cu_seqlens.diff().long() // (2 * size))[sequence_ids_T]
    chunks_T = positions_T // chunk_lengths_T
    owners_T = torch.minimum(chunks_T, 2 * size - 1 - chunks_T)
    return torch.argsort(owners_T, stable=True).view(size, -1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, order):
        ctx.mine = order[parallel.context_parallel_rank()]
        gathered = torch.cat(parallel.context_parallel_all_gather(values))
        return torch.empty_like(gathered).index_copy_(0, order.flatten(), gathered)

    @staticmethod
    def backward(ctx, grad_T):
        return grad_T[ctx.mine], None
