"""What the sending ranks of a layout would broadcast: every tensor of the model once, in buckets of the size asked for."""

import math

import pytest
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from safetensors.torch import load_file

LAYOUTS = {
    "TP 2 SP": ("qwen2", 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2 VPP 2": ("qwen2", 2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "DP 2 EP 2": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "PP 2 DP 2 EP 2": ("qwen3_moe", 4, {"pipeline_parallel": 2, "expert_parallel": 2}),
}
BUCKET_BYTES = 20_000


def planned(rank, folder, role):
    """This rank's buckets as lists of (name, bytes)."""
    from megarl.engine.weights import WeightSender

    buckets = WeightSender(make_engine(folder, **role), BUCKET_BYTES).plan()
    return [[(name, 4 * math.prod(shape)) for name, shape in zip(bucket.names, bucket.shapes)] for bucket in buckets]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_together_send_every_tensor_once(tmp_path, layout):
    family, world_size, role = LAYOUTS[layout]
    folder = write_hf_model(tmp_path, family, True, vocab_size=101)
    ranks = run_ranks(planned, world_size, folder, role, **role)
    assert sum(bool(buckets) for buckets in ranks) == role.get("pipeline_parallel", 1)
    sent = {}
    for bucket in (bucket for buckets in ranks for bucket in buckets):
        assert len(bucket) == 1 or sum(size for _, size in bucket) <= BUCKET_BYTES
        for name, size in bucket:
            assert name not in sent
            sent[name] = size
    (file,) = folder.glob("*.safetensors")
    assert sent == {name: tensor.nbytes for name, tensor in load_file(file).items()}
