"""Every family's table, there and back: names, shards, and whole folders of safetensors."""

import json

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from safetensors.torch import load_file

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.mapping import Parameter, from_shards, to_shard
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError

CONFIG = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
HF_ROWS = {
    "q_proj": 32,
    "k_proj": 16,
    "v_proj": 16,
    "gate_proj": 48,
    "up_proj": 48,
    "embed_tokens": 101,
    "lm_head": 101,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_parameter_survives_sharding_and_back(family, size):
    shape = ModelShape.from_hf({**CONFIG, "model_type": family})
    for line in FAMILIES[family].MAPPING:
        key = Parameter(line, layer=1, expert=3)
        tensors = []
        for name in key.hf_names(shape):
            assert ("layers.1." in name) == ("layers" in line) and ("experts.3." in name) == ("expert" in line)
            rows = next((rows for part, rows in HF_ROWS.items() if part in name), 32)
            columns = 48 if "down_proj" in name else 32
            tensors.append(torch.randn(rows) if name.endswith("bias") or "norm" in name else torch.randn(rows, columns))
        shards = [to_shard(shape, key, tensors, rank, size) for rank in range(size)]
        assert all(shard.shape == shards[0].shape for shard in shards)
        split = size > 1 and not ("norm" in line or "router" in line)
        assert (shards[0].numel() < sum(tensor.numel() for tensor in tensors)) == split
        for tensor, back in zip(tensors, from_shards(shape, key, shards), strict=True):
            assert torch.equal(tensor, back), line


def whole_model(rank, folder, dtype):
    """HF name -> (dtype, bytes) on the ranks that send."""
    engine = make_engine(folder, dtype)
    return {
        name: (str(tensor.dtype), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in engine.hf_tensors()
        if tensor.numel()
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied, dtype", [(True, "float32"), (False, "bfloat16")])
def test_a_folder_of_several_files_is_read_and_given_back_bit_for_bit(tmp_path, family, tied, dtype):
    folder = write_hf_model(
        tmp_path, family, tied, vocab_size=101, num_layers=2, dtype=getattr(torch, dtype), max_shard_size="40KB"
    )
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 2
    original = {name: tensor for file in files for name, tensor in load_file(file).items()}
    experts = json.loads((folder / "config.json").read_text()).get("num_experts_per_tok")
    split = {"expert_parallel": 2} if experts else {"tensor_parallel": 2}
    results = run_ranks(whole_model, 2, folder, dtype, **split)
    found = {name: tensor for result in results for name, tensor in result.items()}
    assert found.keys() == original.keys() and ("lm_head.weight" in found) != tied
    for name, tensor in original.items():
        assert found[name] == (str(tensor.dtype), tensor.view(torch.uint8).numpy().tobytes()), name


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            ("decoder.layers.{layer}.input_layernorm.weight", 5, None),
        ),
        (
            "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
            ("decoder.layers.{layer}.pre_mlp_layernorm.weight", 5, None),
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight", ("decoder.layers.{layer}.mlp.linear_fc1.weight", 4, None)),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight3",
            ("decoder.layers.{layer}.mlp.experts.{expert}.linear_fc2.weight", 4, 11),
        ),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            ("decoder.layers.{layer}.mlp.experts.{expert}.linear_fc2.weight", 4, 11),
        ),
        ("output_layer.weight", ("output_layer.weight", None, None)),
    ],
)
def test_both_layer_implementations_have_one_name_for_a_parameter(name, expected):
    assert Parameter.parse(name, first_layer=4, first_expert=8) == Parameter(*expected)


def test_a_tied_output_layer_reads_the_embedding():
    shape = ModelShape.from_hf({**CONFIG, "model_type": "qwen2", "tie_word_embeddings": True})
    assert Parameter.parse("output_layer.weight").hf_names(shape) == ("model.embed_tokens.weight",)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3, qwen3_moe",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"partial_rotary_factor": 0.5}, "a partial_rotary_factor below 1 is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling .*yarn.* is not supported"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf({**CONFIG, "model_type": "llama"} | changes)
