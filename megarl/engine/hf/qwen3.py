"""Qwen3, dense (HF `model_type: qwen3`): Llama with a norm on each head's query and key."""

from megarl.engine.hf import llama
from megarl.engine.hf.shape import ModelShape

MAPPING = llama.MAPPING | {
    "decoder.layers.{layer}.self_attention.q_layernorm.weight": ("model.layers.{layer}.self_attn.q_norm.weight",),
    "decoder.layers.{layer}.self_attention.k_layernorm.weight": ("model.layers.{layer}.self_attn.k_norm.weight",),
}


def transformer_arguments(shape: ModelShape) -> dict:
    if shape.hf.get("use_sliding_window") or shape.hf.get("attention_bias"):
        raise ValueError("config.json: use_sliding_window and attention_bias are not supported for qwen3")
    return {"add_qkv_bias": False, "qk_layernorm": True}
