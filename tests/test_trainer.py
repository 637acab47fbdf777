import json
from types import SimpleNamespace

import pytest
import torch
from scoring import scorer

from megarl.algorithms.kl_controller import KLController
from megarl.collect import Collector, shuffle_rewards
from megarl.config import Config
from megarl.data.stream import PromptStream
from megarl.errors import RunError
from megarl.monitor.console import Console
from megarl.sample import Prompt, Sample
from megarl.trainer import Trainer


@pytest.mark.parametrize(
    "dtype, limit, difference, stops",
    [
        ("float32", None, 9e-5, False),
        ("float32", None, 2e-4, True),
        ("bfloat16", None, 0.04, False),
        ("bfloat16", None, 0.06, True),
        ("bfloat16", 0.01, 0.04, True),
        ("float32", None, float("nan"), True),
    ],
)
def test_a_run_stops_where_trainer_and_server_disagree(dtype, limit, difference, stops):
    config = SimpleNamespace(model=SimpleNamespace(dtype=dtype), rollout=SimpleNamespace(logprob_diff_limit=limit))
    trainer = object.__new__(Trainer)
    trainer.config = config
    if stops:
        with pytest.raises(RunError, match="rollout/logprob_diff_mean is .* above its limit"):
            trainer.check_agreement(difference)
    else:
        trainer.check_agreement(difference)


def test_shuffled_rewards_are_a_permutation_that_the_seed_and_step_decide():
    def shuffled(seed, step):
        samples = [SimpleNamespace(reward=float(i), reward_parts={"a": float(i)}) for i in range(20)]
        shuffle_rewards(samples, seed, step)
        assert all(sample.reward_parts == {"a": sample.reward} for sample in samples)
        return [sample.reward for sample in samples]

    assert sorted(shuffled(1, 1)) == [float(i) for i in range(20)] != shuffled(1, 1)
    assert shuffled(1, 1) == shuffled(1, 1) != shuffled(1, 2)


def test_logprobs_that_are_not_finite_skip_the_step_and_its_line_is_still_written():
    algorithm = {"prompts_per_step": 1, "group_size": 2, "reward": "completed"}
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "trainer": {"steps": 2}}
    settings["algorithm"] = algorithm
    added = []

    def generate(name, prompts, group_size, tokenizer, seeds):
        samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(group_size)]
        for sample in samples:
            sample.rollout_logprobs = torch.tensor([0.0, -1.0, -2.0])
        return samples

    def logprobs(samples, temperature, reference=False):
        return [(torch.tensor([0.0, float("nan"), -2.0]), None if reference else torch.ones(3)) for _ in samples]

    trainer = object.__new__(Trainer)
    trainer.config = Config.model_validate(settings)
    trainer.inputs = SimpleNamespace(tokenizer=None)
    trainer.actor = SimpleNamespace(logprobs=logprobs)
    trainer.critic = trainer.teacher = None
    trainer.kl = KLController(0.0)
    trainer.skipped = SimpleNamespace(add=lambda when, samples, why: added.append(why), count=1)
    trainer.fleet = SimpleNamespace(
        generate=generate, push=lambda version: {"sync/canary_diff": 0.0}, restarts=0, version=0
    )
    trainer.progress = SimpleNamespace(hold=lambda: None, begin_if_due=lambda step: None)
    trainer.run = SimpleNamespace(log_samples=lambda step, samples: None, log_failed=lambda step, failed: None)
    inputs = SimpleNamespace(stream=PromptStream([Prompt([], [1])], 1), tokenizer=None, vocab_size=8)
    trainer.collector = Collector(trainer.config, inputs, trainer.fleet, scorer(settings["algorithm"]["reward"]))
    trainer.console = SimpleNamespace(loud=lambda text: None)
    metrics = trainer.step(1)
    assert added == ["4 log-probs or values of its samples are not finite"] and metrics["skipped_updates"] == 1
    json.dumps(metrics, allow_nan=False)
    with Console() as console:
        console.begin("steps", 1)
        console.step(metrics, 1)
