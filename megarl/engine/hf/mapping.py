"""Megatron shards <-> full HF tensors, both ways from one table per family.

A table line with one HF name is a plain tensor (replicated, or split along one dimension), with three is the fused QKV
projection (per KV group: its queries, its key, its value), with two the fused gate and up projection (each split on its
own, so a rank holds its gate rows, then its up rows).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.shape import ModelShape

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
VALUE_HEAD = {"value_head.weight": ("score.weight",), "value_head.bias": ("score.bias",)}  # of every family

# How transformer-engine's layers name what the local ones, and the tables, name otherwise.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_ADAPTER = re.compile(r"\.lora_([ab])\.weight$")
_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))$")


@dataclass(frozen=True)
class Parameter:
    """A Megatron parameter under the tables' name, whichever layer implementation holds it."""

    line: str  # a key of the family's table
    layer: int | None  # in the whole model
    expert: int | None  # of the whole layer

    @classmethod
    def parse(cls, name: str, first_layer: int = 0, first_expert: int = 0) -> "Parameter":
        """`name` counts layers from the model chunk's first and experts from this rank's first."""
        layer = expert = None
        if match := _LAYER.search(name):
            layer = int(match.group()) + first_layer
            prefix, rest = f"{name[: match.start()]}{{layer}}.", name[match.end() + 1 :]
            name = prefix + FUSED_NORMS.get(rest, rest)
        if match := _EXPERT.search(name):
            expert = int(match.group(1) or match.group(4)) + first_expert
            name = f"{name[: match.start()]}.experts.{{expert}}.{match.group(2) or match.group(3)}.weight"
        return cls(name, layer, expert)

    def hf_names(self, shape: ModelShape) -> tuple[str, ...]:
        """The HF tensors behind it. Raises KeyError where the family's table lacks it."""
        table = FAMILIES[shape.family].MAPPING | VALUE_HEAD
        line = "embedding.word_embeddings.weight" if self.line == "output_layer.weight" and shape.tied else self.line
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in table[line])

    @property
    def adapted(self) -> "Parameter | None":
        """The weight whose LoRA adapter it is a matrix of; None: it is none."""
        return replace(self, line=_ADAPTER.sub(".weight", self.line)) if _ADAPTER.search(self.line) else None

    @property
    def partition_dim(self) -> int:
        """The dimension along which tensor parallelism splits it; -1 where every rank holds all of it."""
        if match := _ADAPTER.search(self.line):  # B has the weight's rows, A its columns
            dim = 0 if match.group(1) == "b" else 1
            return dim if self.adapted.partition_dim == dim else -1
        if self.line in VOCABULARY or ".linear_qkv." in self.line or ".linear_fc1." in self.line:
            return 0
        return 1 if ".linear_proj." in self.line or ".linear_fc2." in self.line else -1


def padded_vocab_size(shape: ModelShape, tensor_parallel: int) -> int:
    """Rows that Megatron holds: a multiple of 64 on each rank."""
    multiple = 64 * tensor_parallel
    return -(-shape.vocab_size // multiple) * multiple


def to_shard(
    shape: ModelShape, parameter: Parameter, tensors: list[torch.Tensor], rank: int, size: int
) -> torch.Tensor:
    """This tensor-parallel rank's part of a parameter, from its full HF tensors in table order."""
    if len(tensors) == 3:
        groups = [t.view(shape.num_kv_heads, -1, *t.shape[1:]) for t in tensors]
        return torch.cat(groups, dim=1).reshape(-1, *tensors[0].shape[1:]).chunk(size)[rank]
    if len(tensors) == 2:
        return torch.cat([t.chunk(size)[rank] for t in tensors])
    (tensor,) = tensors
    if parameter.line in VOCABULARY:
        padding = padded_vocab_size(shape, size) - shape.vocab_size
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, padding))
    dim = parameter.partition_dim
    return tensor if dim < 0 else tensor.chunk(size, dim)[rank]


def from_shards(shape: ModelShape, parameter: Parameter, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """The full HF tensors of a parameter, in table order, from the shards of all tensor-parallel ranks."""
    num_tensors = len(parameter.hf_names(shape))
    if num_tensors == 3:
        tail = shards[0].shape[1:]
        groups = _joined(shards, 0).view(shape.num_kv_heads, -1, *tail)
        sizes = [groups.shape[1] - 2 * shape.head_dim, shape.head_dim, shape.head_dim]
        return [part.reshape(-1, *tail) for part in groups.split(sizes, dim=1)]
    if num_tensors == 2:
        gates, ups = zip(*(shard.chunk(2) for shard in shards))
        return [_joined(gates, 0), _joined(ups, 0)]
    dim = parameter.partition_dim
    tensor = shards[0] if dim < 0 else _joined(shards, dim)
    return [tensor[: shape.vocab_size] if parameter.line in VOCABULARY else tensor]


def _joined(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim)  # a single one need not be copied


def load_shard(
    shape: ModelShape,
    parameter: Parameter,
    destination: torch.Tensor,
    read: Callable[[str], torch.Tensor],
    rank: int,
    size: int,
) -> None:
    """Copy a parameter from HF tensors; `read(hf_name)` gives the full tensor."""
    names = parameter.hf_names(shape)
    shard = to_shard(shape, parameter, [read(n) for n in names], rank, size)
    if shard.shape != destination.shape:
        raise ValueError(
            f"{' + '.join(names)}: shape {tuple(shard.shape)} on this rank, {parameter.line} needs {tuple(destination.shape)}"
        )
    destination.copy_(shard)
