"""Llama 2, Llama 3 and SmolLM2 (HF `model_type: llama`)."""

from megarl.engine.hf.shape import ModelShape

MAPPING = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "decoder.layers.{layer}.input_layernorm.weight": ("model.layers.{layer}.input_layernorm.weight",),
    "decoder.layers.{layer}.self_attention.linear_qkv.weight": (
        "model.layers.{layer}.self_attn.q_proj.weight",
        "model.layers.{layer}.self_attn.k_proj.weight",
        "model.layers.{layer}.self_attn.v_proj.weight",
    ),
    "decoder.layers.{layer}.self_attention.linear_proj.weight": ("model.layers.{layer}.self_attn.o_proj.weight",),
    "decoder.layers.{layer}.pre_mlp_layernorm.weight": ("model.layers.{layer}.post_attention_layernorm.weight",),
    "decoder.layers.{layer}.mlp.linear_fc1.weight": (
        "model.layers.{layer}.mlp.gate_proj.weight",
        "model.layers.{layer}.mlp.up_proj.weight",
    ),
    "decoder.layers.{layer}.mlp.linear_fc2.weight": ("model.layers.{layer}.mlp.down_proj.weight",),
}


def transformer_arguments(shape: ModelShape) -> dict:
    if shape.hf.get("attention_bias") or shape.hf.get("mlp_bias"):
        raise ValueError("config.json: attention_bias and mlp_bias are not supported for llama")
    return {"add_qkv_bias": False}
