"""LoRA (Hu et al., arXiv:2106.09685) in Megatron's and transformer-engine's parallel linear layers.

A layer with an adapter gives W x + (alpha / rank) B A x (equation 3), where W and all other weights are frozen. A
[rank, in] and B [out, rank] are its `lora_a.weight` and `lora_b.weight`, beside W under its name. Where W's rows are
split over tensor-parallel ranks, B's are split in the same way and every rank holds all of A; where W's columns are
split, A's are, and every rank holds all of B. What is exchanged in between has `rank` numbers per token.
"""

import math
import zlib
from collections.abc import Iterable

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megarl.config_lora import ATTENTION, LoraConfig
from megarl.engine import parallel
from megarl.engine.hf.mapping import VALUE_HEAD, Parameter
from megarl.engine.hf.peft import merge
from megarl.engine.hf.shape import ModelShape


class Adapter:
    """Mixed into one of Megatron's or transformer-engine's linear layers."""

    split: str  # which of the two matrices is split over tensor-parallel ranks
    split_dim: int

    def __init__(self, input_size: int, output_size: int, *, config, lora: LoraConfig, **arguments):
        super().__init__(input_size, output_size, config=config, **arguments)
        self.lora_scale = lora.scale
        rows, columns = self.weight.shape  # of this rank
        place = {"bias": False, "device": parallel.device(), "dtype": config.params_dtype}
        self.lora_a = torch.nn.utils.skip_init(torch.nn.Linear, columns, lora.rank, **place)
        self.lora_b = torch.nn.utils.skip_init(torch.nn.Linear, lora.rank, rows, **place)
        for name, matrix in (("lora_a", self.lora_a.weight), ("lora_b", self.lora_b.weight)):
            is_split = name == self.split
            stride = self.weight.partition_stride if is_split else 1
            set_tensor_model_parallel_attributes(matrix, is_split, self.split_dim if is_split else -1, stride)
            # The whole one sees this rank's tokens only: `finalize_model_grads` sums its gradient over ranks.
            matrix.sequence_parallel = config.sequence_parallel and not is_split

    @torch.no_grad()
    def merged_weight(self) -> torch.Tensor:
        """This rank's part of W + (alpha / rank) B A."""
        return merge(self.weight, self.lora_a.weight, self.lora_b.weight, self.lora_scale)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """The layer's own method takes both matrices for whole on every rank."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = f"{self.split}.weight"
        tensors = {name: getattr(self, self.split).weight}
        made = make_sharded_tensors_for_checkpoint(tensors, prefix, {name: self.split_dim}, sharded_offsets)
        if self.weight.partition_stride == 2:  # rows of gates, then of ups, on every rank
            made = {key: apply_swiglu_sharded_factory(shard, sharded_offsets) for key, shard in made.items()}
        return state | made


class ColumnAdapter(Adapter):
    """Of a layer whose weight's rows are split."""

    split, split_dim = "lora_b", 0

    def __init__(self, *sizes, **arguments):
        super().__init__(*sizes, **arguments)
        self.has_norm = hasattr(self, "return_layernorm_output")  # of transformer-engine, before the product
        if self.has_norm:
            self.return_layernorm_output = True

    def forward(self, x):
        output, bias = super().forward(x)
        if self.has_norm:
            output, x = output
        low = self.lora_a(x)
        if self.config.sequence_parallel:
            low = gather_from_sequence_parallel_region(low)
        else:
            low = copy_to_tensor_model_parallel_region(low)
        return torch.add(output, self.lora_b(low), alpha=self.lora_scale), bias


class RowAdapter(Adapter):
    """Of a layer whose weight's columns are split."""

    split, split_dim = "lora_a", 1

    def forward(self, x):
        output, bias = super().forward(x)
        low = self.lora_a(x)
        if self.config.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        else:
            low = reduce_from_tensor_model_parallel_region(low)
        return torch.add(output, self.lora_b(low), alpha=self.lora_scale), bias


def add_adapters(layer: ModuleSpec, lora: LoraConfig, shape: ModelShape) -> None:
    """Have a layer's linear modules built with adapters."""
    for name in lora.matrices(shape):
        submodules = layer.submodules.self_attention.submodules
        if name not in ATTENTION:
            submodules = layer.submodules.mlp.keywords["submodules"]
        adapter = ColumnAdapter if name in ("linear_qkv", "linear_fc1") else RowAdapter
        setattr(submodules, name, with_adapter(adapter, getattr(submodules, name), lora))


def with_adapter(adapter: type[Adapter], linear: type[torch.nn.Module], lora: LoraConfig):
    """What builds a `linear` layer of Megatron with an adapter."""
    adapted = type(f"{linear.__name__}With{adapter.__name__}", (adapter, linear), {})
    return lambda *sizes, **arguments: adapted(*sizes, lora=lora, **arguments)


@torch.no_grad()
def start_adapters(parameters: Iterable[tuple[Parameter, torch.nn.Parameter]]) -> None:
    """Freeze all parameters but adapters and a value head. A is drawn, whatever the layout, as in the paper's own
    code, uniformly between -1 / sqrt(in) and 1 / sqrt(in); B is 0: the model is as it was.
    """
    for key, parameter in parameters:
        parameter.requires_grad_(key.adapted is not None or key.line in VALUE_HEAD)
        if key.line.endswith(".lora_a.weight"):
            num_parts = parallel.tensor_parallel_size() if key.partition_dim == 1 else 1
            rank, columns = parameter.shape[0], parameter.shape[1] * num_parts
            generator = torch.Generator().manual_seed(zlib.crc32(f"{key.line} {key.layer}".encode()))
            whole = torch.rand(rank, columns, generator=generator).mul_(2).sub_(1).div_(math.sqrt(columns))
            parameter.copy_(whole.chunk(num_parts, 1)[parallel.tensor_parallel_rank() if num_parts > 1 else 0])
        elif key.adapted is not None:
            parameter.zero_()


def adapted_weights(chunks: list[GPTModel]) -> dict[torch.nn.Parameter, Adapter]:
    """Each weight that has an adapter -> its layer."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return {module.weight: module for module in modules if isinstance(module, Adapter)}
