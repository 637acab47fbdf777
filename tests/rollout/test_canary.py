"""What the canary sees of a real server whose weights are not quite the trainer's."""

import copy
from types import SimpleNamespace

import pytest
import torch
from rollout_reference import CONTEXT, hf_weights, reference_logprobs

from megarl.errors import RunError
from megarl.rollout.canary import Canary

LIMIT = 1e-4  # of float32


@pytest.fixture(scope="module")
def trained(model):
    """The next version of the server's model."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other


def canary(client, model, limit=LIMIT):
    """The trainer's side is transformers on the same weights."""
    actor = SimpleNamespace(
        start_logprobs=lambda samples, temperature: (
            lambda: [(reference_logprobs(model, x.token_ids), None) for x in samples]
        )
    )
    return Canary(actor, client, model.config.vocab_size, CONTEXT, limit)


def checked(canary, version):
    return canary.compare(version, canary.ask_trainer(version)(), canary.ask_servers(version, timeout_s=60))


def right(weights, before):
    return weights


def zeroed(weights, before):
    return weights | {
        "model.layers.0.mlp.up_proj.weight": torch.zeros_like(weights["model.layers.0.mlp.up_proj.weight"])
    }


def swapped(weights, before):
    first, second = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"
    return weights | {first: weights[second], second: weights[first]}


def stale_layer(weights, before):
    return weights | {name: tensor for name, tensor in before.items() if "layers.1." in name}


def stale_bias(weights, before):
    return weights | {name: tensor for name, tensor in before.items() if name.endswith("q_proj.bias")}


def stale_embedding(weights, before):
    """Which is the output layer too, as they are tied."""
    return weights | {"model.embed_tokens.weight": before["model.embed_tokens.weight"]}


def not_a_number(weights, before):
    broken = weights["model.norm.weight"].clone()
    broken[3] = float("nan")
    return weights | {"model.norm.weight": broken}


def test_right_weights_pass_whatever_the_version(sglang_server, make_client, model, trained, push):
    client = make_client([sglang_server.url])
    client.close_gate()  # as in a push: the canary goes past it
    push(hf_weights(trained), "5")
    right = canary(client, trained)
    assert all(checked(right, version) < LIMIT / 5 for version in (5, 6))
    for version in range(40):  # each comes back as the tokens that were sent
        client.score_now(right.token_ids(version), timeout_s=60).result()
    assert right.token_ids(5) != right.token_ids(6) and right.token_ids(5) == right.token_ids(5)


@pytest.mark.parametrize("broken", [zeroed, swapped, stale_layer, stale_bias, stale_embedding, not_a_number])
def test_a_server_with_wrong_weights_is_named(sglang_server, make_client, model, trained, push, broken):
    client = make_client([sglang_server.url])
    push(list(broken(dict(hf_weights(trained)), dict(hf_weights(model))).items()), "5")
    with pytest.raises(RunError, match=f"version 5: {sglang_server.url} and the trainer differ by .* above 0.0001"):
        checked(canary(client, trained), 5)


def test_servers_that_disagree_below_the_limit_are_named():
    """Two servers on cue: one of them is off by less than the trainer may be."""
    expected = torch.linspace(-5, -1, 64)
    answers = {"http://one": expected, "http://two": expected + 5e-5}
    with pytest.raises(
        RunError, match="http://one and http://two differ by 5e-05 .* above 1e-05: one of them has other weights"
    ):
        Canary(None, None, 100, CONTEXT, LIMIT).compare(1, [(expected, None)], answers)


def test_a_short_context_makes_a_short_canary():
    assert len(Canary(None, None, 100, 20, LIMIT).token_ids(3)) == 19
