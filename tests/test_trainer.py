import json
from types import SimpleNamespace

import pytest
import torch

from megarl.config import Config
from megarl.errors import RunError
from megarl.monitor.console import Console
from megarl.sample import Prompt, Sample
from megarl.trainer import Trainer, shuffle_rewards


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
        samples = [SimpleNamespace(reward=float(i)) for i in range(20)]
        shuffle_rewards(samples, seed, step)
        return [sample.reward for sample in samples]

    assert sorted(shuffled(1, 1)) == [float(i) for i in range(20)] != shuffled(1, 1)
    assert shuffled(1, 1) == shuffled(1, 1) != shuffled(1, 2)


def actor_that_skips(on_cue):
    """A role whose updates are not finite on cue: `on_cue` says which of them."""
    calls = iter(on_cue)

    def train_step(samples, loss, rate, temperature, entropy_gradient):
        result = {"loss": 1.0, "grad_norm": 2.0, "clipped": 0.0, "kl_old": 0.0, "nonfinite_logprobs": 0.0}
        return result | {"skipped": next(calls), "entropy_gradient": entropy_gradient}

    return SimpleNamespace(train_step=train_step)


def update(actor, **algorithm):
    """(metrics of an update of six samples without advantages, what was handed to SkippedUpdates, lines)."""
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"mini_batch_size": 2} | algorithm}
    added, lines = [], []
    trainer = SimpleNamespace(
        config=Config.model_validate(settings),
        actor=actor,
        skipped=SimpleNamespace(add=lambda when, samples, why: added.append((when, len(samples)))),
        console=SimpleNamespace(line=lines.append),
        loss=None,
    )
    samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(6)]
    for sample in samples:
        sample.advantages = torch.zeros(3)
    return Trainer.update(trainer, samples, 3, 1.0), added, lines


def test_a_skipped_update_is_handed_on_and_leaves_the_means_to_the_others():
    metrics, added, _ = update(actor_that_skips([0.0, 1.0, 0.0]), kl_coefficient=0.1)
    assert added == [("step_000003", 2)]
    assert metrics["loss/policy"] == 1.0 and metrics["grad_norm"] == 2.0


def test_a_step_whose_updates_were_all_skipped_has_no_means():
    metrics, added, _ = update(actor_that_skips([1.0, 1.0, 1.0]), kl_coefficient=0.1)
    assert len(added) == 3 and metrics.keys() == {"learning_rate"}


def test_without_advantages_only_a_kl_or_entropy_term_is_worth_an_update():
    metrics, _, lines = update(actor_that_skips([]))
    assert metrics["grad_norm"] == 0.0 and "changes nothing" in lines[0]
    for term in ("kl_coefficient", "entropy_coefficient"):
        metrics, _, lines = update(actor_that_skips([0.0] * 3), **{term: 0.1})
        assert metrics["grad_norm"] == 2.0 and not lines


def test_logprobs_that_are_not_finite_skip_the_step_and_its_line_is_still_written():
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"prompts_per_step": 1, "group_size": 2},
                "trainer": {"steps": 2}}  # fmt: skip
    added = []

    def generate(prompts, group_size, tokenizer):
        samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(group_size)]
        for sample in samples:
            sample.rollout_logprobs = torch.tensor([0.0, -1.0, -2.0])
        return samples

    def logprobs(samples, temperature, reference=False):
        return [(torch.tensor([0.0, float("nan"), -2.0]), None if reference else torch.ones(3)) for _ in samples]

    trainer = object.__new__(Trainer)
    trainer.config = Config.model_validate(settings)
    trainer.inputs = SimpleNamespace(tokenizer=None)
    trainer.prompts = SimpleNamespace(next=lambda count: [Prompt([], [1])])
    trainer.actor = SimpleNamespace(logprobs=logprobs)
    trainer.reward = lambda sample: float(sample.index)
    trainer.skipped = SimpleNamespace(add=lambda when, samples, why: added.append(why), count=1)
    trainer.fleet = SimpleNamespace(generate=generate, push=lambda version: {"sync/canary_diff": 0.0}, restarts=0)
    trainer.run = SimpleNamespace(log_samples=lambda step, samples: None)
    metrics = trainer.step(1)
    assert added == ["4 log-probs of its samples are not finite"] and metrics["skipped_updates"] == 1
    json.dumps(metrics, allow_nan=False)
    with Console() as console:
        console.begin("steps", 1)
        console.step(metrics, 1)
