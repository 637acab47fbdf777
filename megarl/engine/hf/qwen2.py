"""Qwen2 and Qwen2.5 (HF `model_type: qwen2`): Llama with biases on the query, key and value projections."""

from megarl.engine.hf import llama
from megarl.engine.hf.shape import ModelShape

MAPPING = llama.MAPPING | {
    "decoder.layers.{layer}.self_attention.linear_qkv.bias": (
        "model.layers.{layer}.self_attn.q_proj.bias",
        "model.layers.{layer}.self_attn.k_proj.bias",
        "model.layers.{layer}.self_attn.v_proj.bias",
    ),
}


def transformer_arguments(shape: ModelShape) -> dict:
    if shape.hf.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not supported for qwen2")
    return {"add_qkv_bias": True}
