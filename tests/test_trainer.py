from types import SimpleNamespace

import pytest

from megarl.config import Config
from megarl.errors import RunError
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
def test_a_run_stops_where_trainer_and_server_disagree_at_first(dtype, limit, difference, stops):
    config = SimpleNamespace(model=SimpleNamespace(dtype=dtype), rollout=SimpleNamespace(logprob_diff_limit=limit))
    trainer = SimpleNamespace(config=config)
    if stops:
        with pytest.raises(RunError, match="rollout/logprob_diff_mean is .* above its limit"):
            Trainer.check_agreement(trainer, difference)
    else:
        Trainer.check_agreement(trainer, difference)


def test_shuffled_rewards_are_a_permutation_that_the_seed_and_step_decide():
    def shuffled(seed, step):
        samples = [SimpleNamespace(reward=float(i)) for i in range(20)]
        shuffle_rewards(samples, seed, step)
        return [sample.reward for sample in samples]

    assert sorted(shuffled(1, 1)) == [float(i) for i in range(20)] != shuffled(1, 1)
    assert shuffled(1, 1) == shuffled(1, 1) != shuffled(1, 2)


def broken_actor(skip):
    """A role whose updates are not finite on cue: `skip` says which of them."""
    calls = iter(skip)

    def train_step(samples, *_):
        skipped = next(calls)
        return {"skipped": skipped, "loss": 1.0, "grad_norm": 2.0, "clipped": 0.0, "kl_old": 0.0, "nonfinite_logprobs": 0.0}

    return SimpleNamespace(train_step=train_step)


def trainer_with(actor, added):
    settings = Config.model_validate(
        {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"mini_batch_size": 2, "kl_coefficient": 0.1}}
    )
    skipped = SimpleNamespace(add=lambda step, samples, why: added.append((step, len(samples), why)), count=0)
    console = SimpleNamespace(line=lambda text: None)
    return SimpleNamespace(config=settings, actor=actor, skipped=skipped, console=console, loss=None)


def test_a_skipped_update_is_handed_on_and_leaves_the_means_to_the_others():
    samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(6)]
    added = []
    metrics = Trainer.update(trainer_with(broken_actor([0.0, 1.0, 0.0]), added), samples, 3, 1.0)
    assert [(step, count) for step, count, _ in added] == [(3, 2)]
    assert metrics["loss/policy"] == 1.0 and metrics["grad_norm"] == 2.0


def test_a_step_of_skipped_updates_alone_has_no_means():
    samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(2)]
    added = []
    metrics = Trainer.update(trainer_with(broken_actor([1.0]), added), samples, 3, 1.0)
    assert len(added) == 1 and metrics["loss/policy"] == 0.0
