"""Qwen3, dense (HF `model_type: qwen3`): Llama with a norm on each head's query and key."""

from megarl.engine.hf import llama

MAPPING = llama.MAPPING | {
    "decoder.layers.{}.self_attention.q_layernorm.weight": ("model.layers.{}.self_attn.q_norm.weight",),
    "decoder.layers.{}.self_attention.k_layernorm.weight": ("model.layers.{}.self_attn.k_norm.weight",),
}


def transformer_arguments(hf: dict) -> dict:
    if hf.get("use_sliding_window") or hf.get("attention_bias"):
        raise ValueError("config.json: use_sliding_window and attention_bias are not supported for qwen3")
    return {"add_qkv_bias": False, "qk_layernorm": True}
