"""FLOPs against a count by hand, parameters against transformers."""

import pytest
import torch

from megarl.engine.hf.flops import forward_flops, parameter_count
from megarl.engine.hf.shape import ModelShape

QWEN_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}


def test_flops_of_qwen2_5_1_5b_are_those_counted_by_hand():
    shape = ModelShape.from_hf(QWEN_1_5B)
    query_and_output = 2 * 1536 * 1536
    key_and_value = 2 * 1536 * 256
    gate_up_down = 3 * 1536 * 8960
    assert query_and_output + key_and_value + gate_up_down == 46_792_704
    head = 1536 * 151936
    weights = 28 * 46_792_704 + head
    assert weights == 1_543_569_408
    assert forward_flops(shape, 1) == 2 * weights + 2 * 28 * 1536
    # 1000 tokens: 2 * 1000 * weights, and 28 layers * 12 heads * 2 products * 2 * 128 * 1000^2 / 2 of attention
    assert forward_flops(shape, 1000) == 3_087_138_816_000 + 86_016_000_000


def test_a_token_passes_the_router_and_its_top_experts_only():
    shape = ModelShape.from_hf(SMALL | MOE | {"model_type": "qwen3_moe"})
    attention = 64 * 256 + 2 * 64 * 128 + 256 * 64
    mlp = 64 * 8 + 2 * 3 * 64 * 32
    assert forward_flops(shape, 10) == 2 * 10 * (3 * (attention + mlp) + 64 * 100) + 2 * 3 * 8 * 32 * 10**2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "family, extra",
    [("llama", {}), ("mistral", {}), ("qwen2", {}), ("qwen3", {"head_dim": 32}), ("qwen3_moe", MOE)],
)
def test_parameters_are_as_many_as_in_transformers(family, extra, tied):
    assert_same_count(SMALL | extra | {"model_type": family, "tie_word_embeddings": tied})


def test_qwen2_5_1_5b_has_its_released_number_of_parameters():
    assert parameter_count(ModelShape.from_hf(QWEN_1_5B)) == 1_543_714_304
    assert_same_count(QWEN_1_5B)


def assert_same_count(hf: dict) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameter_count(ModelShape.from_hf(hf)) == model.num_parameters()
