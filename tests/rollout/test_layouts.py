"""Weights of real Megatron ranks in real SGLang servers of another layout: the servers' log-probs are the actor's.

Every server starts on other weights than the actor's and every actor has weights of its own, so that a tensor which
does not come, or comes to the wrong place, is seen. A server takes half a minute and more to start: actors share them.
"""

import itertools
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from rollout_reference import hf_weights, reference_logprobs, serving
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl.config import SamplingConfig
from megarl.errors import RunError
from megarl.rollout.client import RolloutClient
from megarl.rollout.server import free_port, post
from megarl.rollout.weights_group import WeightsGroup, describe, fill

BUCKET_BYTES = 20_000  # a layer takes several, and the largest matrices are larger than one
TIMEOUT_S = 90
TOLERANCE = 1e-5
VERSIONS, SEEDS = itertools.count(1), itertools.count(1)
DENSE_ACTORS = {
    "TP 2 PP 2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "PP 2 VPP 2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
}
MOE_ACTORS = {
    "EP 2": (2, {"expert_parallel": 2}),
    "PP 2 EP 2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "EP 2 ETP 2": (4, {"expert_parallel": 2, "expert_tensor_parallel": 2}),
}


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory):
    """The vocabulary of 101 is padded to 256 rows in Megatron's TP 2 and to 128 in SGLang."""
    folder = tmp_path_factory.mktemp("dense")
    return write_hf_model(folder, "qwen2", tied=False, vocab_size=101, num_key_value_heads=2)


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    """One key/value head, which both ranks of the server hold."""
    folder = tmp_path_factory.mktemp("moe")
    return write_hf_model(folder, "qwen3_moe", tied=False, vocab_size=101, num_layers=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def dense_server(dense_folder, tmp_path_factory):
    with serving(dense_folder, 2, tmp_path_factory.mktemp("layouts") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def moe_server(moe_folder, tmp_path_factory):
    with serving(moe_folder, 2, tmp_path_factory.mktemp("layouts") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def second_server(model_folder, tmp_path_factory):
    """Beside the session's, of the same shape; it does not survive the last test that uses it."""
    folder = redrawn(model_folder, tmp_path_factory.mktemp("second"))
    with serving(folder, 1, tmp_path_factory.mktemp("layouts") / "server.log") as server:
        yield server


def redrawn(model_folder: Path, folder: Path) -> Path:
    """The model in `folder`, with random weights unlike those of any other call."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    weights = load_file(model_folder / "model.safetensors")
    for name in sorted(weights):
        noise = torch.randn(weights[name].shape, generator=generator)
        weights[name] = weights[name] + 0.1 * noise if noise.dim() == 1 else 0.1 * noise
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    return folder


def hf_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """Every token twice but the last, which SGLang reports as token 0."""
    ids = torch.randperm(vocab_size - 1, generator=torch.Generator().manual_seed(0))
    return [*ids.chunk(2), *ids.flip(0).chunk(2)]


def reference(model) -> torch.Tensor:
    return torch.cat([reference_logprobs(model, ids) for ids in sequences(model.config.vocab_size)])


def assert_all_servers_hold(client: RolloutClient, folder: Path, version: str) -> None:
    model = hf_model(folder)
    expected = reference(model)
    ids = [ids.tolist() for ids in sequences(model.config.vocab_size)]
    for index in range(len(client.urls)):
        found = torch.tensor([x for values in client.logprobs(ids, server_index=index) for x in values])
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    assert client.weight_versions() == [version] * len(client.urls)


def send_weights(rank, folder, role, urls, server_tensor_parallel, ports, version):
    """What coordinator and actor do together; here the stages' sending ranks call the servers themselves.

    Broadcast through a group on each stage's port; without ports, by handles of the ranks' memory.
    """
    from megarl.engine import parallel
    from megarl.engine.weights import WeightSender

    sender = WeightSender(make_engine(folder, **role), BUCKET_BYTES)
    for stage in range(parallel.pipeline_parallel_size()):
        if stage == parallel.pipeline_parallel_rank() and parallel.helps_to_send():
            if ports is None:
                sender.share(dict.fromkeys(urls, server_tensor_parallel), version, TIMEOUT_S)
            elif parallel.sends_weights():
                broadcast(sender, urls, server_tensor_parallel, ports[stage], f"{version}-{stage}", version)
            else:
                sender.send(TIMEOUT_S)
        parallel.barrier()


def broadcast(sender, urls, server_tensor_parallel, port, group, version):
    client = RolloutClient(urls, SamplingConfig(), TIMEOUT_S, 0, 1, [], 1)
    world_size = 1 + len(urls) * server_tensor_parallel
    offsets = range(1, world_size, server_tensor_parallel)
    joined = [
        client.join_weights_group(index, "127.0.0.1", port, offset, world_size, group, "gloo", TIMEOUT_S)
        for index, offset in enumerate(offsets)
    ]
    sender.join("127.0.0.1", port, [f"rank {rank}" for rank in range(1, world_size)], group, TIMEOUT_S)
    for server in joined:
        server.result()
    received = client.receive_weights(sender.plan(), group, version, TIMEOUT_S)
    sender.send(TIMEOUT_S)
    received.result()
    client.close()


def push_from_ranks(client: RolloutClient, server_tensor_parallel: int, folder: Path, actor, way: str) -> None:
    """Have an actor of (number of ranks, layout) send the folder's weights to all servers; see that they are there."""
    world_size, role = actor
    ports = [free_port("127.0.0.1") for _ in range(role.get("pipeline_parallel", 1))] if way == "broadcast" else None
    version = str(next(VERSIONS))
    run_ranks(send_weights, world_size, folder, role, client.urls, server_tensor_parallel, ports, version, **role)
    assert_all_servers_hold(client, folder, version)


@pytest.mark.parametrize("model", ["dense_folder", "moe_folder", "model_folder"])
def test_one_tensor_left_as_it_was_would_be_seen(request, tmp_path, model):
    folder = request.getfixturevalue(model)
    before, after = hf_model(folder), hf_model(redrawn(folder, tmp_path))
    expected = reference(after)
    for new, old in zip(tensors(after), tensors(before), strict=True):
        kept = new.clone()
        new.copy_(old)
        assert (reference(after) - expected).abs().max() > 20 * TOLERANCE
        new.copy_(kept)


def tensors(model) -> list[torch.Tensor]:
    """The parameters; of experts, which transformers stacks, one after another."""
    return [x for p in model.parameters() for x in (p.data.unbind() if p.dim() == 3 else [p.data])]


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout, way", [("TP 2 PP 2", "broadcast"), ("TP 2 PP 2", "shared memory"), ("PP 2 VPP 2", "broadcast")]
)
def test_untied_weights_with_biases_reach_a_server_of_tp_2(
    dense_server, dense_folder, make_client, tmp_path, layout, way
):
    folder = redrawn(dense_folder, tmp_path)
    push_from_ranks(make_client([dense_server.url]), 2, folder, DENSE_ACTORS[layout], way)


@pytest.mark.usefixtures("push")  # which gives the session's server its weights back
@pytest.mark.parametrize("way", ["broadcast", "shared memory"])
def test_tied_weights_reach_two_servers(sglang_server, second_server, model_folder, make_client, tmp_path, way):
    client = make_client([sglang_server.url, second_server.url])
    push_from_ranks(client, 1, redrawn(model_folder, tmp_path), (2, {"pipeline_parallel": 2}), way)


def test_an_update_whose_cache_flush_is_refused_fails_and_the_server_says_why(second_server, make_client):
    """SGLang refuses it, and ends, where requests wait in place for the end of a pause; our pauses abort them."""
    url, client, port = second_server.url, make_client([second_server.url]), free_port("127.0.0.1")
    joined = client.join_weights_group(0, "127.0.0.1", port, 1, 2, "refused", "gloo", TIMEOUT_S)
    group = WeightsGroup("gloo", "127.0.0.1", port, 0, 2, "refused", TIMEOUT_S)
    joined.result()
    weights = hf_weights(hf_model(second_server.model_path))
    bucket = describe(weights)
    requests = {
        "input_ids": [[i, 5, 9] for i in range(64)],
        "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        generating = pool.submit(post, url + "/generate", requests, TIMEOUT_S, "generating")
        wait_for_requests(url)
        post(url + "/pause_generation", {"mode": "in_place"}, TIMEOUT_S, "pausing")
        received = client.receive_weights([bucket], "refused", "7", TIMEOUT_S)
        group.broadcast(fill(torch.empty(bucket.num_bytes, dtype=torch.uint8), weights)).wait()
        with pytest.raises(RunError, match=f"{url}/update_weights_from_tensor: "):
            received.result()
        with pytest.raises(RunError, match="generating"):
            generating.result()
    group.abort()
    assert "Cache flush failed after updating weights" in second_server.death_report(wait_s=30)


def wait_for_requests(url: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    num_requests = 0
    while num_requests == 0:
        assert time.monotonic() < deadline, f"{url} has no request after {TIMEOUT_S} s"
        time.sleep(0.05)
        with urllib.request.urlopen(url + "/get_load", timeout=TIMEOUT_S) as response:
            num_requests = sum(load["num_reqs"] for load in json.load(response))


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout, way",
    [
        ("EP 2", "broadcast"),
        pytest.param("EP 2", "shared memory", marks=pytest.mark.soak),
        pytest.param("PP 2 EP 2", "broadcast", marks=pytest.mark.soak),
        pytest.param("EP 2 ETP 2", "broadcast", marks=pytest.mark.soak),
    ],
)
def test_experts_reach_a_server_of_tp_2_in_their_order(moe_server, moe_folder, make_client, tmp_path, layout, way):
    push_from_ranks(make_client([moe_server.url]), 2, redrawn(moe_folder, tmp_path), MOE_ACTORS[layout], way)


@pytest.mark.soak
def test_two_servers_of_tp_2_are_behind_one_another_in_the_group(
    dense_server, dense_folder, make_client, tmp_path, tmp_path_factory
):
    with serving(redrawn(dense_folder, tmp_path), 2, tmp_path_factory.mktemp("layouts") / "server.log") as other:
        client = make_client([dense_server.url, other.url])
        folder = redrawn(dense_folder, tmp_path_factory.mktemp("actor"))
        push_from_ranks(client, 2, folder, DENSE_ACTORS["TP 2 PP 2"], "broadcast")
