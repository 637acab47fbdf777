"""RMSNorm and core attention for Megatron's local layer spec: what a machine without transformer-engine needs.

Megatron's own torch norm refuses sequence parallelism and its DotProductAttention refuses packed sequences.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from megarl.engine import parallel


class RMSNorm(torch.nn.RMSNorm):
    """Tags its weight, so that `finalize_model_grads` sums its gradient over TP ranks under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=parallel.device())
        self.weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """Causal attention over packed `thd` sequences: query [T, heads, d], key and value [T, KV heads, d] -> [T, 1, heads*d]."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        assert config.context_parallel_size == 1 and config.attention_dropout == 0.0
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, **_):
        assert packed_seq_params is not None and packed_seq_params.qkv_format == "thd", "only packed batches are supported"
        attend = _varlen_attention if query.dtype in (torch.bfloat16, torch.float16) and query.is_cuda else _sdpa_per_sequence
        out = attend(query, key, value, packed_seq_params, self.scale)
        return out.reshape(out.shape[0], 1, -1)


def _varlen_attention(query, key, value, packed, scale):
    repeats = query.shape[1] // key.shape[1]  # torch 2.11's varlen_attn has no enable_gqa
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    cu_seqlens, longest = packed.cu_seqlens_q, packed.max_seqlen_q
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(-1, 0))


def _sdpa_per_sequence(query, key, value, packed, scale):
    """Exact in float32 on every device: one call per sequence."""
    cu_seqlens = packed.cu_seqlens_q
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    grouped = query.shape[1] != key.shape[1]
    outs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths)):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, t, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)
