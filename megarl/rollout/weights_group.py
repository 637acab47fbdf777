"""The trainer's end of a weight broadcast group that SGLang servers join.

SGLang's own helpers do the same but importing them loads SGLang into the trainer. Both ends must agree on how the
store's keys are prefixed (`sglang.srt.utils.init_custom_process_group`) and on how a bucket is laid out
(`sglang.srt.weight_sync.tensor_bucket`); tests/rollout/test_weights.py compares them with a real server.
"""

import math
from datetime import timedelta
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroup, distributed_c10d
from torch.distributed.rendezvous import rendezvous


def init_weights_group(
    backend: str, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, timeout_s: float
) -> ProcessGroup:
    """Join the group; blocks until all `world_size` ranks have, at most `timeout_s`. Rank 0 hosts the store.

    A server of tensor parallel n is n ranks, from its `rank_offset` on. The group stands beside the default one:
    `torch.distributed.broadcast(tensor, src=0, group=...)` works with the ranks of this group.
    Raises torch.distributed.DistStoreError or RuntimeError when the others do not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    address = f"tcp://{master_address}:{master_port}"
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        distributed_c10d.Backend(backend),
        PrefixStore(group_name, store),
        group_name=group_name,
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class Bucket(NamedTuple):
    """What a server must know of a bucket before it arrives, as `/update_weights_from_distributed` words it."""

    names: list[str]
    dtypes: list[str]  # "bfloat16"
    shapes: list[list[int]]


def describe(named_tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    names = [name for name, _ in named_tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors]
    shapes = [list(tensor.shape) for _, tensor in named_tensors]
    return Bucket(names, dtypes, shapes)


def num_bytes(bucket: Bucket) -> int:
    return sum(
        math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True)
    )


def flatten(named_tensors: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """[bytes] uint8: the tensors one after another without gaps, SGLang's layout of a `flattened_bucket`.

    The server views each slice as its dtype again, which needs an aligned start: with mixed dtypes, put the wider
    ones first. Raises ValueError for an empty list or a tensor that would start off its alignment.
    """
    if not named_tensors:
        raise ValueError("a weight bucket must hold at least one tensor")
    start = 0
    for name, tensor in named_tensors:
        if start % tensor.element_size() != 0:
            raise ValueError(f"{name} ({tensor.dtype}) would start at byte {start} of a bucket; wider dtypes go first")
        start += tensor.numel() * tensor.element_size()
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in named_tensors])
