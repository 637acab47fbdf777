"""Generation and scoring by a real SGLang server, compared with transformers."""

import threading
import time

import pytest
import torch
from rollout_reference import CONTEXT, reference_logprobs

from megarl.errors import RunError
from megarl.rollout import http
from megarl.rollout.seeds import group_seeds
from megarl.rollout.server import NEVER_PUSHED
from megarl.sample import Prompt, Status

PROMPTS = [Prompt([], [1, 40 + i, 77, 5, 301, 12 + i]) for i in range(3)]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.5)])
def test_rollout_logprobs_are_those_of_logits_over_temperature(
    sglang_server, make_client, tokenizer, model, temperature, top_p
):
    client = make_client([sglang_server.url], temperature=temperature, top_p=top_p, max_new_tokens=24)
    for sample in client.generate(PROMPTS, 2, tokenizer):
        expected = reference_logprobs(model, sample.token_ids, temperature)
        expected[: sample.prompt_length] = 0
        torch.testing.assert_close(sample.rollout_logprobs, expected, atol=1e-4, rtol=0)


def test_each_prompt_gets_a_group_of_whole_samples_in_order(sglang_server, make_client, tokenizer):
    samples = make_client([sglang_server.url]).generate(PROMPTS, 4, tokenizer)
    assert [sample.group_id for sample in samples] == [0] * 4 + [1] * 4 + [2] * 4
    assert [sample.index for sample in samples] == list(range(12))
    assert len({tuple(sample.token_ids.tolist()) for sample in samples}) == 12
    for sample in samples:
        prompt = PROMPTS[sample.group_id]
        assert sample.prompt is prompt
        assert sample.token_ids[: sample.prompt_length].tolist() == prompt.token_ids
        assert sample.loss_mask.tolist() == [False] * len(prompt.token_ids) + [True] * sample.response_length
        assert sample.rollout_logprobs.shape == sample.token_ids.shape
        assert sample.rollout_logprobs.dtype == torch.float32
        assert sample.policy_version == (NEVER_PUSHED, NEVER_PUSHED)
        response = sample.token_ids[sample.prompt_length :]
        assert sample.response_text == tokenizer.decode(response, skip_special_tokens=True)


def test_each_sample_of_a_seeded_group_is_asked_for_with_its_own_seed(
    sglang_server, make_client, tokenizer, monkeypatch
):
    """A server on a CPU has no deterministic inference and leaves the seeds alone."""
    sent, call = [], http.call

    async def recorded(session, url, path, body, timeout_s):
        sent.append(body)
        return await call(session, url, path, body, timeout_s)

    monkeypatch.setattr(http, "call", recorded)
    client = make_client([sglang_server.url])
    for group_size in (3, 1):
        sent.clear()
        seeds = group_seeds(1, 2, PROMPTS, group_size, max_new_tokens=16, vocab_size=448)
        samples = client.generate(PROMPTS, group_size, tokenizer, seeds=seeds)
        assert [sample.group_id for sample in samples] == [i for i in range(3) for _ in range(group_size)]
        for sample in samples:
            assert sample.token_ids[: sample.prompt_length].tolist() == PROMPTS[sample.group_id].token_ids
            assert sample.rollout_logprobs.shape == sample.token_ids.shape
        assert [body["input_ids"] for body in sent] == [[prompt.token_ids] * group_size for prompt in PROMPTS]
        params = [[(one["n"], one["sampling_seed"]) for one in body["sampling_params"]] for body in sent]
        assert params == [[(1, seed) for seed in group] for group in seeds]


def test_the_stop_token_is_the_last_trained_token(sglang_server, make_client, tokenizer, model):
    greedy = make_client([sglang_server.url]).generate(PROMPTS[:1], 1, tokenizer, temperature=0.0)[0]
    response = greedy.token_ids[greedy.prompt_length :].tolist()
    stop = response[3]
    client = make_client([sglang_server.url], stop_token_ids=[stop], top_k=1)  # the same tokens, but with log-probs
    sample = client.generate(PROMPTS[:1], 1, tokenizer)[0]
    assert sample.token_ids[sample.prompt_length :].tolist() == response[: response.index(stop) + 1]
    assert sample.status is Status.COMPLETED
    assert sample.loss_mask[-1]
    expected = reference_logprobs(model, sample.token_ids)[-1]
    torch.testing.assert_close(sample.rollout_logprobs[-1], expected, atol=1e-4, rtol=0)


def test_greedy_takes_the_most_likely_tokens_and_has_no_logprobs(sglang_server, make_client, tokenizer, model):
    for sample in make_client([sglang_server.url]).generate(PROMPTS, 1, tokenizer, temperature=0.0):
        with torch.no_grad():
            best = model(sample.token_ids[None]).logits[0].argmax(-1)
        assert torch.equal(best[sample.prompt_length - 1 : -1], sample.token_ids[sample.prompt_length :])
        assert sample.rollout_logprobs is None


@pytest.mark.parametrize("prompt_length, response_length", [(200, 16), (246, 10), (250, 6), (255, 1)])
def test_a_response_ends_where_the_context_ends(sglang_server, make_client, tokenizer, prompt_length, response_length):
    client = make_client([sglang_server.url], stop_token_ids=[], top_k=1)  # top_k: no end of turn by chance
    sample = client.generate([Prompt([], [7] * prompt_length)], 1, tokenizer)[0]
    assert sample.response_length == response_length
    assert sample.status is Status.TRUNCATED


def test_a_prompt_as_long_as_the_context_is_refused(sglang_server, make_client, tokenizer):
    prompt = Prompt([], [7] * CONTEXT, metadata={"source": "train.jsonl:3"})
    with pytest.raises(RunError, match="train.jsonl:3: 256 tokens leave no room .* context of 256"):
        make_client([sglang_server.url]).generate([prompt], 1, tokenizer)


def test_given_tokens_are_scored_at_temperature_1(sglang_server, make_client, model):
    client = make_client([sglang_server.url], temperature=0.7)
    sequences = [[1, 40, 77, 5, 301, 12], [1, 2, 3], [9]]
    scores = client.logprobs(sequences)
    scores_of_first_server = client.logprobs(sequences, server_index=0)
    for token_ids, values, same in zip(sequences, scores, scores_of_first_server, strict=True):
        expected = reference_logprobs(model, torch.tensor(token_ids))
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(same), expected, atol=1e-4, rtol=0)


def test_a_refused_request_shows_what_the_server_said(sglang_server, make_client, tokenizer):
    with pytest.raises(RunError, match="HTTP 400.*input_ids cannot be empty"):
        make_client([sglang_server.url]).generate([Prompt([], [])], 1, tokenizer)


def test_what_a_pause_aborts_is_generated_again_after_it(sglang_server, make_client, tokenizer):
    client = make_client([sglang_server.url], max_retries=0, stop_token_ids=[], max_new_tokens=240)
    samples = []
    generation = threading.Thread(target=lambda: samples.extend(client.generate(PROMPTS * 10, 2, tokenizer)))
    generation.start()
    time.sleep(0.3)  # into the generation of 60 x 240 tokens
    client.close_gate()
    client.pause()
    generation.join(1.0)
    assert generation.is_alive()
    client.resume()
    client.open_gate()
    generation.join(120)
    assert len(samples) == 60
    assert all(sample.status is not Status.ABORTED for sample in samples)


def test_a_closed_gate_holds_requests_back(sglang_server, make_client, tokenizer):
    client = make_client([sglang_server.url])
    client.close_gate()
    samples = []
    generation = threading.Thread(target=lambda: samples.extend(client.generate(PROMPTS, 1, tokenizer)))
    generation.start()
    generation.join(1.0)
    assert generation.is_alive()
    client.open_gate()
    generation.join(60)
    assert len(samples) == 3
