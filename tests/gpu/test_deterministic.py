"""Sampled tokens under SGLang's deterministic inference; one server, about two minutes."""

import pytest
import torch
from transformers import AutoTokenizer

from megarl.config import SamplingConfig
from megarl.data import toy
from megarl.rollout.client import RolloutClient
from megarl.rollout.seeds import SERVER_ARGS, group_seeds
from megarl.rollout.server import Server
from megarl.sample import Prompt

pytestmark = pytest.mark.gpu
GROUP_SIZE, MAX_NEW_TOKENS = 8, 96


@pytest.fixture
def client(tmp_path):
    toy.make(tmp_path, seed=1)
    server_args = SERVER_ARGS | {"mem_fraction_static": 0.2, "cuda_graph_max_bs": 64}
    server = Server(str(tmp_path / "model"), "bfloat16", "cuda", 1, None, server_args, tmp_path / "server.log", 400)
    server.start()
    try:
        server.wait_ready()
        client = RolloutClient([server.url], SamplingConfig(max_new_tokens=MAX_NEW_TOKENS), 300, 0, 64, [], 256)
        yield client
        client.close()
    finally:
        server.stop()


def test_equal_seeds_give_equal_samples_whatever_else_the_server_does(client, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    prompts = [Prompt([], [1, *range(5, 6 + i), 40 + i]) for i in range(24)]
    seeds = group_seeds(1, 7, prompts, GROUP_SIZE, MAX_NEW_TOKENS, vocab_size=448)

    def generate(places, seeds=seeds):
        """place of the prompt -> its group's token ids and log-probs"""
        samples = client.generate([prompts[i] for i in places], GROUP_SIZE, tokenizer, seeds=[seeds[i] for i in places])
        groups = [samples[first : first + GROUP_SIZE] for first in range(0, len(samples), GROUP_SIZE)]
        return {i: [(s.token_ids.tolist(), s.rollout_logprobs) for s in group] for i, group in zip(places, groups)}

    together = generate(range(24))
    assert all(len({tuple(ids) for ids, _ in group}) == GROUP_SIZE for group in together.values())
    for places in (range(23, -1, -1), [3], [20, 11], range(24)):
        for i, group in generate(places).items():
            assert [ids for ids, _ in group] == [ids for ids, _ in together[i]]
            assert all(torch.equal(a, b) for (_, a), (_, b) in zip(group, together[i], strict=True))
    other = generate([3], group_seeds(2, 7, prompts, GROUP_SIZE, MAX_NEW_TOKENS, vocab_size=448))
    assert [ids for ids, _ in other[3]] != [ids for ids, _ in together[3]]
