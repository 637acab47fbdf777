from types import SimpleNamespace

import torch

from megarl.config import Config
from megarl.sample import Prompt, Sample
from megarl.update import Updater


def actor_that_skips(on_cue):
    """A role whose updates are not finite on cue: `on_cue` says which of them."""
    calls = iter(on_cue)

    def start_train_step(samples, loss, rate, temperature, entropy_gradient):
        result = {"loss": 1.0, "grad_norm": 2.0, "clipped": 0.0, "kl_old": 0.0, "nonfinite_logprobs": 0.0}
        return lambda: result | {"skipped": next(calls), "entropy_gradient": entropy_gradient}

    return SimpleNamespace(start_train_step=start_train_step)


def update(actor, **algorithm):
    """(metrics of an update of six samples without advantages, what was handed to SkippedUpdates, lines)."""
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": {"mini_batch_size": 2} | algorithm}
    added, lines = [], []
    skipped = SimpleNamespace(add=lambda when, samples, why: added.append((when, len(samples))))
    updater = Updater(Config.model_validate(settings), actor, None, SimpleNamespace(line=lines.append), skipped)
    samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(6)]
    for sample in samples:
        sample.advantages = torch.zeros(3)
    return updater.run(samples, 3, algorithm.get("kl_coefficient", 0.0)), added, lines


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
