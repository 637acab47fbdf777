"""A tiny model and one real SGLang server for all rollout tests of the session."""

import functools
import uuid

import pytest
import torch
from rollout_reference import CONTEXT, hf_weights, serving
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.config import SamplingConfig
from megarl.data import toy
from megarl.rollout.client import RolloutClient
from megarl.rollout.server import NEVER_PUSHED, free_port
from megarl.rollout.weights_group import WeightsGroup, describe, fill

SHARPEN = 6.0  # the toy's initialisation is too flat: wrongly aligned log-probs would hardly differ


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rollout")
    toy.make(folder / "toy", seed=1)
    path = folder / "toy" / "model" / "model.safetensors"
    weights = {name: w * SHARPEN if w.dim() == 2 else w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return folder / "toy" / "model"


@pytest.fixture(scope="session")
def sglang_server(model_folder, tmp_path_factory):
    with serving(model_folder, 1, tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="session")
def model(model_folder):
    """The same weights in transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture
def make_client():
    """make_client(urls, max_new_tokens=..., ...) -> RolloutClient, closed after the test."""
    clients = []

    def make(urls, request_timeout_s=120, max_retries=1, stop_token_ids=(2,), **sampling):
        sampling = SamplingConfig(**{"max_new_tokens": 16, **sampling})
        client = RolloutClient(urls, sampling, request_timeout_s, max_retries, 64, list(stop_token_ids), CONTEXT)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def push(sglang_server, make_client, model):
    """push(named_tensors, version): one bucket to the server; what it reports, "" where all is well.

    The model's own weights come back after the test.
    """
    client = make_client([sglang_server.url])

    def joined():
        name, port = f"test-{uuid.uuid4().hex[:8]}", free_port("127.0.0.1")
        server = client.join_weights_group(0, "127.0.0.1", port, 1, 2, name, "gloo", timeout_s=60)
        group = WeightsGroup("gloo", "127.0.0.1", port, 0, 2, name, timeout_s=60)
        server.result()
        return name, group

    def push_to(name, group, named_tensors, version):
        bucket = describe(named_tensors)
        received = client.receive_weights([bucket], name, version, timeout_s=60)
        group.broadcast(fill(torch.empty(bucket.num_bytes, dtype=torch.uint8), named_tensors)).wait()
        received.result()
        return group.reports(timeout_s=60)[1]

    name, group = joined()
    yield functools.partial(push_to, name, group)
    last_name, last_group = joined()  # a test that joins the server to groups of its own ends the first one
    push_to(last_name, last_group, hf_weights(model), str(NEVER_PUSHED))
    for each in (group, last_group):
        each.abort()
