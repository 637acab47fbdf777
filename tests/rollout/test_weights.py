"""Weights from this process to a real SGLang server through a gloo group, as the trainer sends them."""

import copy

import pytest
import torch
from rollout_reference import hf_weights, reference_logprobs

from megarl.errors import RunError
from megarl.rollout.weights_group import describe, flatten, num_bytes
from megarl.sample import Prompt

SEQUENCE = [1, 40, 77, 5, 301, 12, 90, 33]


def test_pushed_weights_answer_and_stamp_their_version(sglang_server, make_client, tokenizer, model, push):
    client = make_client([sglang_server.url])
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = torch.tensor(client.logprobs([SEQUENCE])[0])

    push(hf_weights(other), "3")
    after = torch.tensor(client.logprobs([SEQUENCE])[0])
    torch.testing.assert_close(after, reference_logprobs(other, torch.tensor(SEQUENCE)), atol=1e-4, rtol=0)
    assert (after - before).abs().max() > 0.1
    assert client.weight_versions() == ["3"]
    sample = client.generate([Prompt([], SEQUENCE)], 1, tokenizer)[0]
    assert sample.policy_version == (3, 3)


def test_the_prefix_cache_does_not_survive_a_push(sglang_server, make_client, tokenizer, model, push):
    client = make_client([sglang_server.url])
    prompt = Prompt([], SEQUENCE * 8)
    client.generate([prompt], 2, tokenizer)  # its keys and values are cached now
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(-2)
        other.model.embed_tokens.weight.add_(0.1 * torch.randn_like(other.model.embed_tokens.weight))
    push(hf_weights(other), "1")
    sample = client.generate([prompt], 1, tokenizer)[0]
    expected = reference_logprobs(other, sample.token_ids)[sample.prompt_length :]
    torch.testing.assert_close(sample.rollout_logprobs[sample.prompt_length :], expected, atol=1e-4, rtol=0)


def test_a_tensor_of_the_wrong_shape_is_an_error_with_the_servers_message(push):
    with pytest.raises(RunError, match="update_weights_from_distributed.*Failed to update parameter online"):
        push([("model.norm.weight", torch.zeros(7))], "4")


def test_flatten_lays_tensors_end_to_end():
    bucket = flatten([("a", torch.tensor([[1.5, -2.0]])), ("b", torch.tensor([3.0], dtype=torch.bfloat16))])
    assert bucket.dtype == torch.uint8
    assert bucket[:8].view(torch.float32).tolist() == [1.5, -2.0]
    assert bucket[8:].view(torch.bfloat16).tolist() == [3.0]
    assert num_bytes(describe([("a", torch.zeros(1, 2)), ("b", torch.zeros(1, dtype=torch.bfloat16))])) == 10 == len(bucket)


def test_flatten_reads_a_view_in_its_logical_order():
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert flatten([("a", transposed)]).view(torch.float32).tolist() == [0, 3, 1, 4, 2, 5]


def test_flatten_refuses_a_tensor_off_its_alignment():
    with pytest.raises(ValueError, match="b .torch.float32. would start at byte 2 of a bucket"):
        flatten([("a", torch.zeros(1, dtype=torch.bfloat16)), ("b", torch.zeros(1))])
    with pytest.raises(ValueError, match="at least one tensor"):
        flatten([])
