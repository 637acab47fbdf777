"""Each family's table, there and back, for every tensor-parallel size it allows."""

import pytest
import torch

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.mapping import from_shards, hf_names, to_shard
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
HF_ROWS = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 48, "up_proj": 48, "embed_tokens": 101, "lm_head": 101}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_parameter_survives_sharding_and_back(family, size):
    shape = ModelShape.from_hf({**CONFIG, "model_type": family})
    for name in FAMILIES[family].MAPPING:
        name = name.format(0)
        dim = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else -1 if "layernorm" in name else 0
        names = hf_names(shape, name, first_layer=1)
        assert all("layers.1." in n for n in names) or "layers" not in name
        tensors = []
        for n in names:
            rows = next((rows for key, rows in HF_ROWS.items() if key in n), 32)
            tensors.append(torch.randn(rows) if n.endswith("bias") or dim < 0 else torch.randn(rows, 48 if "down" in n else 32))
        shards = [to_shard(shape, name, tensors, dim, rank, size) for rank in range(size)]
        assert dim < 0 or all(shard.shape == shards[0].shape for shard in shards)
        for n, tensor, back in zip(names, tensors, from_shards(shape, name, len(names), shards, dim), strict=True):
            assert torch.equal(tensor, back), n


def test_a_tied_output_layer_reads_the_embedding():
    shape = ModelShape.from_hf({**CONFIG, "model_type": "qwen2", "tie_word_embeddings": True})
    assert hf_names(shape, "output_layer.weight", 0) == ("model.embed_tokens.weight",)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling .*yarn.* is not supported"),
    ],
)
def test_what_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_hf({**CONFIG, "model_type": "llama"} | changes)
