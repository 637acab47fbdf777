from types import SimpleNamespace

import pytest
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
    algorithm = {"mini_batch_size": 2} | algorithm
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm}
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
    assert metrics["grad_norm"] == 0.0 and "this step teaches the policy nothing" in lines[0]
    for term in ("kl_coefficient", "entropy_coefficient"):
        metrics, _, lines = update(actor_that_skips([0.0] * 3), **{term: 0.1})
        assert metrics["grad_norm"] == 2.0 and not lines


class Role:
    """Writes what it is told, and by whom, to a log that several share."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def place(self, phase):
        self.log.append((self.name, phase))

    def start_train_step(self, samples, loss, rate, *arguments):
        self.log.append((self.name, "start", [sample.index for sample in samples], loss, rate, *arguments))
        result = {"loss": 1.0, "grad_norm": 2.0, "skipped": 0.0}
        result |= {"value_clipped": 1.0, "value_error": 3.0, "clipped": 1.0, "kl_old": 0.5}

        def wait():
            self.log.append((self.name, "wait"))
            return result

        return wait


def ppo_update(step, num_trained=4, placement="disaggregated", weights=None, kl_coefficient=0.0, **algorithm):
    """(metrics, log) of an update of four samples of two tokens each, the first `num_trained` of them trained."""
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "placement": placement,
            "algorithm": {"name": "ppo", "mini_batch_size": 2, "critic_warmup_steps": 2} | algorithm,
            "roles": {
                "actor": {"optimizer": {"learning_rate": 0.5, "warmup_steps": 4}},
                "critic": {"optimizer": {"learning_rate": 0.25}},
            },
            "rollout": {"sampling": {"temperature": 0.7}},
        }
    )
    log = []
    updater = Updater(config, Role("actor", log), Role("critic", log), SimpleNamespace(line=log.append), None)
    samples = [Sample.from_response(Prompt([], [1]), [2, 3], group_id=0, index=i) for i in range(4)]
    for i, sample in enumerate(samples):
        sample.loss_mask &= i < num_trained
        sample.advantages, sample.weights = sample.loss_mask.float(), weights
    return updater.run(samples, step, kl_coefficient), log


def started(log, name):
    return [entry[2:] for entry in log if entry[:2] == (name, "start")]


def test_actor_and_critic_work_at_the_same_time_on_the_same_mini_batches():
    metrics, log = ppo_update(step=3, entropy_coefficient=0.1, value_clip=0.3, clip_high=0.4, kl_coefficient=0.2)
    order = [("critic", "start"), ("actor", "start"), ("critic", "wait"), ("actor", "wait")]
    assert [entry[:2] for entry in log] == order * 2
    for of_critic, of_actor in zip(started(log, "critic"), started(log, "actor")):
        batch, loss, rate = of_critic
        same_batch, policy, policy_rate, temperature, entropy = of_actor
        assert batch == same_batch and (rate, policy_rate, temperature, entropy) == (0.25, 0.5 / 4, 0.7, True)
        assert loss.keywords == {"clip": 0.3}
        assert policy.keywords.items() >= {"kl_coefficient": 0.2, "clip_high": 0.4, "kind": "ppo"}.items()
    names = ("loss/value", "critic/clip_ratio", "critic/error", "clip/ratio")
    assert [metrics[name] for name in names] == [1, 0.25, 0.75, 0.25]
    assert metrics["learning_rate"] == 0.5 / 4 and metrics["critic/learning_rate"] == 0.25


def test_in_the_first_steps_only_the_critic_is_trained():
    metrics, log = ppo_update(step=2)
    assert len(started(log, "critic")) == 2 and not started(log, "actor")
    assert "learning_rate" not in metrics and "grad_norm" not in metrics and metrics["critic/grad_norm"] == 2.0


@pytest.mark.parametrize("step", [2, 3])
def test_on_shared_gpus_the_critic_is_done_before_the_actor_takes_them(step):
    _, log = ppo_update(step, placement="colocated")
    critic = [("critic", "start"), ("critic", "wait")] * 2
    actor = [("critic", "generate"), ("actor", "update"), *[("actor", "start"), ("actor", "wait")] * 2]
    assert [entry[:2] for entry in log] == critic + (actor if step == 3 else [])


def test_each_epoch_has_all_samples_in_an_order_of_its_own_that_seed_and_step_decide():
    batches = [batch for batch, *_ in started(ppo_update(3, epochs=2)[1], "actor")]
    first, second = batches[0] + batches[1], batches[2] + batches[3]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3] and first != second
    assert batches == [batch for batch, *_ in started(ppo_update(3, epochs=2)[1], "actor")]


def test_a_mini_batch_without_a_trained_token_teaches_nobody():
    metrics, log = ppo_update(3, num_trained=0, entropy_coefficient=0.1, kl_coefficient=0.1)
    assert not started(log, "actor") and not started(log, "critic") and "teaches the policy nothing" in log[0]
    assert metrics["loss/value"] == metrics["grad_norm"] == 0.0
    assert len(started(ppo_update(3, num_trained=1)[1], "critic")) == 1


def test_what_the_correction_takes_out_teaches_the_critic_alone():
    _, log = ppo_update(3, weights=torch.zeros(3))
    assert len(started(log, "critic")) == 2 and not started(log, "actor")
