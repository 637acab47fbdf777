"""What our layers add to transformer-engine's; imported only where transformer-engine is."""

import torch
import transformer_engine_torch as tex
from megatron.core.extensions.transformer_engine import TEDotProductAttention, fused_apply_rotary_pos_emb


class PackedTEAttention(TEDotProductAttention):
    """As `PackedAttention`: query [T / cp, heads, d], key and value [T / cp, KV heads, d] -> [T / cp, heads * d].

    The angles come by token, so one kernel serves packed and context-parallel batches alike.
    """

    def forward(self, query, key, value, attention_mask, packed_seq_params=None, **arguments):
        assert packed_seq_params is not None, "only packed batches are supported"
        query, key = (
            fused_apply_rotary_pos_emb(x.unsqueeze(1), packed_seq_params.angles).squeeze(1) for x in (query, key)
        )
        return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params, **arguments)


class SwiGLU(torch.nn.Module):
    """silu(gate) * up, one kernel each way, of [T, 1, gate and up]: without the guards of a compiled function, which cost
    more than the kernels where layers are small."""

    def __init__(self, config):
        super().__init__()

    def forward(self, gate_and_up):
        return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_and_up):
        ctx.save_for_backward(gate_and_up)
        return tex.swiglu(gate_and_up, None)

    @staticmethod
    def backward(ctx, grad):
        return tex.dswiglu(grad.contiguous(), ctx.saved_tensors[0], None)
