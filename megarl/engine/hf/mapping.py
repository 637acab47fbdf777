"""Megatron shards <-> full HF tensors, both ways from one table per family.

A table line with one HF name is a plain tensor (replicated, or split along Megatron's `partition_dim`), with three is
the fused QKV projection (per KV group: its queries, its key, its value), with two the fused gate and up projection
(each split on its own, so a rank holds its gate rows, then its up rows).
"""

import re
from collections.abc import Callable

import torch

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.shape import ModelShape

_LAYER = re.compile(r"(?<=\.layers\.)\d+")
VOCABULARY_NAMES = ("embedding.word_embeddings.weight", "output_layer.weight")


def padded_vocab_size(shape: ModelShape, tensor_parallel: int) -> int:
    """Rows that Megatron holds: a multiple of 64 on each rank."""
    multiple = 64 * tensor_parallel
    return -(-shape.vocab_size // multiple) * multiple


def hf_names(shape: ModelShape, name: str, first_layer: int) -> tuple[str, ...]:
    """The HF tensors behind one Megatron parameter; `first_layer` is the global number of the stage's layer 0.

    Raises KeyError for a parameter that the family's table lacks.
    """
    match = _LAYER.search(name)
    layer = int(match.group()) + first_layer if match else None
    names = FAMILIES[shape.family].MAPPING[_LAYER.sub("{}", name)]
    if name == "output_layer.weight" and shape.tied:
        names = FAMILIES[shape.family].MAPPING["embedding.word_embeddings.weight"]
    return tuple(n.format(layer) for n in names)


def to_shard(shape: ModelShape, name: str, tensors: list[torch.Tensor], partition_dim: int, rank: int, size: int):
    """This tensor-parallel rank's part of one Megatron parameter, from its full HF tensors in table order.

    `partition_dim` is -1 for a replicated parameter.
    """
    if len(tensors) == 3:
        groups = [t.view(shape.num_kv_heads, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(groups, dim=1).reshape(-1, *tensors[0].shape[1:]).chunk(size)[rank]
    if len(tensors) == 2:
        return torch.cat([t.chunk(size)[rank] for t in tensors])
    (tensor,) = tensors
    if name in VOCABULARY_NAMES:
        padding = padded_vocab_size(shape, size) - shape.vocab_size
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
    return tensor if partition_dim < 0 else tensor.chunk(size, partition_dim)[rank]


def from_shards(shape: ModelShape, name: str, num_tensors: int, shards: list[torch.Tensor], partition_dim: int):
    """The full HF tensors of one Megatron parameter, in table order, from the shards of all tensor-parallel ranks."""
    if num_tensors == 3:
        tail = shards[0].shape[1:]
        groups = torch.cat(shards).view(shape.num_kv_heads, -1, *tail)
        sizes = [groups.shape[1] - 2 * shape.head_dim, shape.head_dim, shape.head_dim]
        return [part.reshape(-1, *tail) for part in groups.split(sizes, dim=1)]
    if num_tensors == 2:
        gates, ups = zip(*(shard.chunk(2) for shard in shards))
        return [torch.cat(gates), torch.cat(ups)]
    tensor = shards[0] if partition_dim < 0 else torch.cat(shards, partition_dim)
    return [tensor[: shape.vocab_size] if name in VOCABULARY_NAMES else tensor]


def load_shard(shape: ModelShape, name: str, parameter, first_layer: int, read: Callable, rank: int, size: int) -> None:
    """Copy one parameter from HF tensors; `read(hf_name)` gives the full tensor."""
    names = hf_names(shape, name, first_layer)
    shard = to_shard(shape, name, [read(n) for n in names], partition_dim(parameter), rank, size)
    if shard.shape != parameter.shape:
        raise ValueError(f"{' + '.join(names)}: shape {tuple(shard.shape)} on this rank, {name} needs {tuple(parameter.shape)}")
    parameter.data.copy_(shard)


def partition_dim(parameter: torch.nn.Parameter) -> int:
    """The dimension along which tensor parallelism splits a parameter; -1 where every rank holds all of it."""
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
