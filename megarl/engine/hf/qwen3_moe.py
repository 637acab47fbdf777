"""Qwen3-MoE (HF `model_type: qwen3_moe`): Qwen3 with a router and experts in place of every MLP."""

from megarl.engine.hf import qwen3
from megarl.engine.hf.shape import ModelShape

DENSE_MLP = ("decoder.layers.{layer}.mlp.linear_fc1.weight", "decoder.layers.{layer}.mlp.linear_fc2.weight")

MAPPING = {name: names for name, names in qwen3.MAPPING.items() if name not in DENSE_MLP} | {
    "decoder.layers.{layer}.mlp.router.weight": ("model.layers.{layer}.mlp.gate.weight",),
    "decoder.layers.{layer}.mlp.experts.{expert}.linear_fc1.weight": (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    ),
    "decoder.layers.{layer}.mlp.experts.{expert}.linear_fc2.weight": (
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
    ),
}


def transformer_arguments(shape: ModelShape) -> dict:
    if shape.hf.get("mlp_only_layers") or shape.hf.get("decoder_sparse_step", 1) != 1:
        raise ValueError("config.json: mlp_only_layers and decoder_sparse_step are not supported for qwen3_moe")
    return qwen3.transformer_arguments(shape) | {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        # softmax over all experts, then the top k; renormalised where the config says so
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not shape.hf.get("norm_topk_prob", False),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
    }
