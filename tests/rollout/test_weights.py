"""Weights from this process to a real SGLang server through a gloo group, as the trainer sends them."""

import copy

import pytest
import torch
from rollout_reference import hf_weights, reference_logprobs

from megarl.rollout.weights_group import describe, fill
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
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(-2)
        other.model.embed_tokens.weight.add_(0.1 * torch.randn_like(other.model.embed_tokens.weight))

    def difference():
        """Of log-probs of new tokens behind the prompt, whose keys and values may be cached, from the new weights'."""
        sample = client.generate([prompt], 1, tokenizer)[0]
        expected = reference_logprobs(other, sample.token_ids)[sample.prompt_length :]
        return (sample.rollout_logprobs[sample.prompt_length :] - expected).abs().max()

    before = client.generate([prompt], 1, tokenizer, temperature=0.0)[0]
    push(hf_weights(other), None)  # a bucket that is not a version's last: no flush, and the cached prefix is used
    assert difference() > 0.01
    push(hf_weights(other), "1")
    sample = client.generate([prompt], 1, tokenizer, temperature=0.0)[0]
    assert difference() < 1e-4
    ids = torch.tensor([prompt.token_ids])
    mask = torch.ones_like(ids)
    (greedy,) = other.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, eos_token_id=2)
    assert sample.token_ids.tolist() == greedy.tolist() != before.token_ids.tolist()
    assert before.policy_version == (-1, -1) and sample.policy_version == (1, 1)


def test_a_tensor_of_the_wrong_shape_is_reported_to_the_sender_and_the_server_lives_on(sglang_server, push, model):
    assert "load weight" in push([("model.norm.weight", torch.zeros(7)), *hf_weights(model)], "4")
    assert push(hf_weights(model), "5") == "" and sglang_server.alive()


def test_a_filled_buffer_holds_the_tensors_end_to_end():
    named = [("a", torch.tensor([[1.5, -2.0]])), ("b", torch.tensor([3.0], dtype=torch.bfloat16))]
    bucket = describe(named)
    assert bucket.num_bytes == 10
    filled = fill(torch.full((16,), 255, dtype=torch.uint8), named)
    assert len(filled) == 10 and filled[:8].view(torch.float32).tolist() == [1.5, -2.0]
    for (name, tensor), (same_name, same) in zip(bucket.tensors(filled), named, strict=True):
        assert name == same_name and tensor.dtype == same.dtype and torch.equal(tensor, same)


def test_fill_reads_a_view_in_its_logical_order():
    transposed = torch.arange(6.0).reshape(2, 3).T
    assert fill(torch.empty(24, dtype=torch.uint8), [("a", transposed)]).view(torch.float32).tolist() == [
        0,
        3,
        1,
        4,
        2,
        5,
    ]


def test_fill_refuses_a_tensor_off_its_alignment():
    buffer = torch.empty(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="b .torch.float32. would start at byte 2 of a bucket"):
        fill(buffer, [("a", torch.zeros(1, dtype=torch.bfloat16)), ("b", torch.zeros(1))])
    with pytest.raises(ValueError, match="at least one tensor"):
        fill(buffer, [])
