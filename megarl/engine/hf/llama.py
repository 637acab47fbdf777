"""Llama 2, Llama 3 and SmolLM2 (HF `model_type: llama`)."""

MAPPING = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight",),
    "output_layer.weight": ("lm_head.weight",),
    "decoder.final_layernorm.weight": ("model.norm.weight",),
    "decoder.layers.{}.input_layernorm.weight": ("model.layers.{}.input_layernorm.weight",),
    "decoder.layers.{}.self_attention.linear_qkv.weight": (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.{}.self_attn.k_proj.weight",
        "model.layers.{}.self_attn.v_proj.weight",
    ),
    "decoder.layers.{}.self_attention.linear_proj.weight": ("model.layers.{}.self_attn.o_proj.weight",),
    "decoder.layers.{}.pre_mlp_layernorm.weight": ("model.layers.{}.post_attention_layernorm.weight",),
    "decoder.layers.{}.mlp.linear_fc1.weight": (
        "model.layers.{}.mlp.gate_proj.weight",
        "model.layers.{}.mlp.up_proj.weight",
    ),
    "decoder.layers.{}.mlp.linear_fc2.weight": ("model.layers.{}.mlp.down_proj.weight",),
}


def transformer_arguments(hf: dict) -> dict:
    if hf.get("attention_bias") or hf.get("mlp_bias"):
        raise ValueError("config.json: attention_bias and mlp_bias are not supported for llama")
    return {"add_qkv_bias": False}
