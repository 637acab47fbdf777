"""What the sending ranks of a layout broadcast: every tensor of the HF folder once and bit for bit, in full buckets."""

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from end_to_end import wait_until
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from safetensors.torch import load_file

from megarl.rollout.server import free_port
from megarl.rollout.weights_group import Bucket, WeightsGroup

LAYOUTS = {  # family, tied, ranks, role
    "TP 2 SP": ("qwen2", False, 2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2 VPP 2": ("qwen2", True, 2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "DP 2 EP 2": ("qwen3_moe", False, 2, {"expert_parallel": 2}),
    "TP 2 EP 2": ("qwen3_moe", True, 2, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1}),
    "DP 2 ETP 2": ("qwen3_moe", True, 2, {"expert_tensor_parallel": 2}),
    "PP 2 DP 2 EP 2": ("qwen3_moe", True, 4, {"pipeline_parallel": 2, "expert_parallel": 2}),
}
BUCKET_BYTES = 20_000  # the embedding is larger; of the experts' matrices it holds several
TIMEOUT_S = 120  # the ranks import first


def send(rank, folder, role, ports):
    """Each stage writes down its plan before it can be joined by the receiving end."""
    from megarl.engine import parallel
    from megarl.engine.weights import WeightSender

    sender = WeightSender(make_engine(folder, **role), BUCKET_BYTES)
    if not parallel.helps_to_send():
        return
    stage = parallel.pipeline_parallel_rank()
    plan = sender.plan()
    assert bool(plan) == parallel.sends_weights()
    if plan:
        (folder / f"plan-{stage}.json").write_text(json.dumps(plan))
    sender.join("127.0.0.1", ports[stage], ["receiver"], f"{folder}-{stage}", TIMEOUT_S)
    sender.send(TIMEOUT_S)


def receive(folder, stage, port):
    """A stage's buckets as lists of (HF name, tensor)."""
    plan = folder / f"plan-{stage}.json"
    # Not before: a connection tried again and again on a port that nobody listens on can in the end be one with itself.
    assert wait_until(plan.exists, TIMEOUT_S)
    group = WeightsGroup("gloo", "127.0.0.1", port, 1, 2, f"{folder}-{stage}", TIMEOUT_S)
    buckets = []
    for bucket in (Bucket(*fields) for fields in json.loads(plan.read_text())):
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        group.broadcast(buffer).wait()
        buckets.append(list(bucket.tensors(buffer)))
    group.report()
    group.abort()
    return buckets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_together_send_every_tensor_once_and_as_it_is(tmp_path, layout):
    family, tied, world_size, role = LAYOUTS[layout]
    experts = {"moe_intermediate_size": 16} if family == "qwen3_moe" else {}
    folder = write_hf_model(tmp_path, family, tied, vocab_size=101, **experts)
    ports = [free_port("127.0.0.1") for _ in range(role.get("pipeline_parallel", 1))]
    with ThreadPoolExecutor(len(ports)) as pool:
        received = [pool.submit(receive, folder, stage, port) for stage, port in enumerate(ports)]
        run_ranks(send, world_size, folder, role, ports, timeout_s=TIMEOUT_S, **role)
        stages = [stage.result() for stage in received]
    original = load_file(folder / "model.safetensors")
    sent = [pair for buckets in stages for bucket in buckets for pair in bucket]
    assert sorted(name for name, _ in sent) == sorted(original)
    for name, tensor in sent:
        assert torch.equal(tensor, original[name]), name
    for buckets in stages:
        sizes = [[tensor.nbytes for _, tensor in bucket] for bucket in buckets]
        assert all(len(size) == 1 or sum(size) <= BUCKET_BYTES for size in sizes)
        assert all(sum(size) + following[0] > BUCKET_BYTES for size, following in itertools.pairwise(sizes))
    assert any(len(bucket) == 1 and bucket[0][1].nbytes > BUCKET_BYTES for buckets in stages for bucket in buckets)
    assert any(layers_of(bucket) & layers_of(following) for b in stages for bucket, following in itertools.pairwise(b))


def layers_of(bucket) -> set[str]:
    return {name.split(".")[2] for name, _ in bucket if "layers" in name}
