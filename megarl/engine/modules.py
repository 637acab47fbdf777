"""RMSNorm, rotary embedding and attention for Megatron's local layer spec, and the head of value models.

Megatron's own torch norm refuses sequence parallelism, its DotProductAttention refuses packed sequences, and its
unfused rotary embedding for them is a Python loop over the sequences of every layer.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from megarl.engine import parallel
from megarl.engine.hf.shape import ModelShape
from megarl.sample import Batch


class RMSNorm(torch.nn.RMSNorm):
    """Tags its weight, so that `finalize_model_grads` sums its gradient over TP ranks under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=parallel.device())
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what its rotary embedding needs, computed once for all layers.

    Under context parallelism the angles are those of this rank's tokens, all else speaks of whole sequences.
    """

    angles: torch.Tensor | None = None  # [T / cp, 1, 1, head_dim] float32
    dtype: torch.dtype = torch.float32

    @cached_property
    def rotation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [T / cp, 1, head_dim]."""
        angles = self.angles.squeeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def packed_sequences(
    batch: Batch, positions_T: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype
) -> PackedSequences:
    """`positions_T`: of this rank's tokens, [T / cp]. No copy from the host: it would wait for all that the GPU has to do."""
    angles_TD = positions_T[:, None].float() * inverse_frequencies
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        pad_between_seqs=False,
        angles=torch.cat([angles_TD, angles_TD], dim=-1)[:, None, None],
        dtype=dtype,
    )


def inverse_frequencies(shape: ModelShape) -> torch.Tensor:
    """[head_dim / 2] float32. RoFormer (arXiv:2104.09864) section 3.2.2; with Llama 3.1's scaling, which divides the
    frequencies of wavelengths beyond the old context by `factor` and blends in between."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    frequencies = 1.0 / shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.old_context * frequencies / (2 * math.pi)  # over the old context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class PackedAttention(MegatronModule):
    """Rotary embedding and causal attention over packed sequences: query [T, heads, d], key and value [T, KV heads, d] ->
    [T, 1, heads * d]."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        assert config.context_parallel_size == 1 and config.attention_dropout == 0.0
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask=None, packed_seq_params: PackedSequences | None = None, **_):
        assert packed_seq_params is not None, "only packed batches are supported"
        query, key = (rotate(x, *packed_seq_params.rotation) for x in (query, key))
        attend = (
            _varlen_attention if query.dtype in (torch.bfloat16, torch.float16) and query.is_cuda else _padded_attention
        )
        out = attend(query, key, value, packed_seq_params, self.scale)
        return out.reshape(out.shape[0], 1, -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _varlen_attention(query, key, value, packed, scale):
    repeats = query.shape[1] // key.shape[1]  # torch 2.11's varlen_attn has no enable_gqa
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(-1, 0))


def _padded_attention(query, key, value, packed, scale):
    """Exact in float32 on every device: the sequences side by side, padded at their end, where a causal mask hides it."""
    cu_seqlens = packed.cu_seqlens_q.long()
    tokens = torch.arange(query.shape[0], device=query.device)
    rows = torch.searchsorted(cu_seqlens, tokens, right=True) - 1  # [T] which sequence
    columns = tokens - cu_seqlens[rows]  # [T] place in it

    def padded(x):
        out = x.new_zeros(len(cu_seqlens) - 1, packed.max_seqlen_q, *x.shape[1:])
        return out.index_put((rows, columns), x).transpose(1, 2)  # [B, heads, longest, d]

    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        padded(query), padded(key), padded(value), is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)[rows, columns]


def residual_add(training: bool, fused: bool):
    """Megatron's bias, dropout and residual, where there is neither bias nor dropout."""
    return lambda output_and_bias, residual, dropout: residual + output_and_bias[0]


class ValueHead(MegatronModule):
    """One value per token in place of the logits: a linear layer, the same on all TP ranks."""

    def __init__(self, config, bias: bool):
        super().__init__(config=config)
        place = {"device": parallel.device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, **place))
        self.bias = torch.nn.Parameter(torch.empty(1, **place)) if bias else None

    @torch.no_grad()
    def initialize(self, std: float) -> None:
        """Weights from N(0, std), the same on all ranks, and bias 0: values start near 0 whatever the model."""
        generator = torch.Generator().manual_seed(0)
        self.weight.copy_(std * torch.randn(self.weight.shape, generator=generator))
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, hidden, weight=None, runtime_gather_output=None):
        """[T / tp under sequence parallelism, 1, H] -> ([T, 1, 1], no bias): what GPTModel expects of its output layer."""
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(
            hidden.float(), self.weight.float(), bias
        ), None  # in bfloat16, values would be off by a hundredth
