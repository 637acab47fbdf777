"""Scores by a real SGLang server of a reward model that was trained and exported here."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from rollout_reference import CONTEXT, serving

from megarl.algorithms.preference_losses import bradley_terry_loss
from megarl.config import Config, CriticConfig, ModelConfig, OptimizerConfig
from megarl.data import toy
from megarl.data.chat import load_tokenizer
from megarl.errors import RunError
from megarl.inputs import SupervisedInputs
from megarl.rewards.model import RewardModel, RewardTokens
from megarl.rollout import health
from megarl.rollout.server import free_port
from megarl.sample import Sample, Status

NUM_STEPS, NUM_PAIRS = 20, 32


def settings_of(folder, **algorithm) -> dict:
    return {
        "name": "x",
        "model": {"path": str(folder / "toy/model"), "dtype": "float32"},
        "data": {"train": str(folder / "toy/preferences.jsonl"), "prompt_key": "question", "max_prompt_tokens": 64},
        "algorithm": algorithm,
    }


def train_and_export(rank, folder):
    """The samples of one more batch of pairs."""
    from megarl.engine import checkpoint, parallel
    from megarl.engine.engine import Engine
    from megarl.engine.hf.export import export_hf

    config = Config.model_validate(settings_of(folder, name="reward_model"))
    rows = SupervisedInputs(config).rows
    role = CriticConfig(value_head_bias=False, value_head_std=0.1)
    engine = Engine(ModelConfig(**dict(config.model)), role, head="value")
    engine.use_optimizer(OptimizerConfig())
    for step in range(NUM_STEPS):
        pairs = sum(rows[step * NUM_PAIRS : (step + 1) * NUM_PAIRS], [])
        engine.train_step(pairs, bradley_terry_loss, 3e-3, pairs=True)
    checkpoint.save(engine, config.model.path, folder / "checkpoint")
    parallel.shutdown()
    export_hf(folder / "checkpoint", folder / "reward")
    return sum(rows[NUM_STEPS * NUM_PAIRS :][:NUM_PAIRS], [])


pytestmark = pytest.mark.soak  # a server of its own


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder with toy/model and reward, samples that it was not trained on)"""
    folder = tmp_path_factory.mktemp("reward_model")
    toy.make(folder / "toy", seed=1)
    ((samples),) = run_ranks(train_and_export, 1, folder)
    ids = [sample.token_ids[sample.prompt_length : -1].tolist() for sample in samples]  # without the score's place
    fresh = [Sample.from_response(s.prompt, r, group_id=i // 2, index=i) for i, (s, r) in enumerate(zip(samples, ids))]
    return folder, fresh


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    with serving(trained[0] / "reward", 1, log, section="roles.reward_server", is_classifier=True) as server:
        yield server


@pytest.fixture
def connect(trained):
    """connect(urls) -> RewardModel of these servers, closed after the test."""
    folder, samples = trained
    roles = {"roles": {"reward_server": {"path": str(folder / "reward")}}}
    rollout = {"rollout": {"sampling": {"max_new_tokens": 10}, "request_timeout_s": 60.0, "max_retries": 0}}
    config = Config.model_validate(settings_of(folder, reward="model") | roles | rollout)
    tokens = RewardTokens(config, load_tokenizer(config.model.path), [samples[0].prompt])
    with ExitStack() as stack:
        yield lambda urls: RewardModel.start(stack, config, SimpleNamespace(wait_reward_servers=lambda: urls), tokens)


@torch.no_grad()
def test_scores_are_those_of_transformers_in_the_order_of_the_samples(trained, server, connect):
    from transformers import AutoModelForSequenceClassification

    folder, samples = trained
    theirs = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    response = [5 + i % 300 for i in range(CONTEXT - samples[0].prompt_length)]
    full = Sample.from_response(samples[0].prompt, response, group_id=0, index=0, status=Status.TRUNCATED)
    samples = [*samples, full, samples[0]]
    model = connect([server.url])
    first, second = model.start_score(samples[:30]), model.start_score(samples[30:])
    last, outcomes = second(), first()
    scores = [outcome.value for outcome in outcomes + last]
    expected = [theirs(sample.token_ids[None]).logits.item() for sample in samples]
    assert scores == pytest.approx(expected, abs=1e-4) and scores[0] == pytest.approx(scores[-1], abs=1e-5)
    assert torch.tensor(expected).std() > 0.1


def test_a_dead_server_ends_the_run_though_others_could_do_its_work(trained, server, connect, monkeypatch):
    monkeypatch.setattr(health, "STRIKE_PAUSE_S", 0.01)
    dead = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    for urls, index in (([server.url, dead], 1), ([dead], 0)):
        with pytest.raises(RunError, match=rf"reward server {index} \({dead}\) is gone: .*Cannot connect"):
            connect(urls).start_score(trained[1][:4])()


def test_what_the_server_refuses_is_shown_with_its_url(trained, server, connect):
    model = connect([server.url])
    model.tokens.context_length = 2 * CONTEXT
    sample = Sample.from_response(trained[1][0].prompt, [5] * CONTEXT, group_id=0, index=0)
    with pytest.raises(RunError, match=f"^scoring by the reward model: {server.url}/classify: HTTP 400: .*long"):
        model.start_score([sample])()


def test_a_server_of_another_model_is_found_out(sglang_server, trained, connect):
    with pytest.raises(RunError, match=f"^scoring by the reward model: {sglang_server.url}/classify: HTTP 400: "):
        connect([sglang_server.url]).start_score(trained[1][:1])()
