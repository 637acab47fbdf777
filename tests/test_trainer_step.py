"""What one iteration asks of whom, in which order, and with what: roles and servers only write it down here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from scoring import scorer

from megarl.config import Config
from megarl.data.stream import PromptStream
from megarl.errors import RunError
from megarl.sample import Prompt, Sample, Status
from megarl.trainer import Trainer

TRAINER, SERVER, REFERENCE = -1.0, -1.00005, -1.5  # log-probs of every trained token
PPO = {"name": "ppo", "whiten_advantages": False, "gae": {"lam": 1.0}}


class Log(list):
    """Callables that note their name and arguments, and return what they are told to."""

    def note(self, name, result=None):
        def call(*arguments, **keywords):
            self.append((name, arguments, keywords))
            return result(*arguments, **keywords) if callable(result) else result

        return call

    def names(self):
        return [name for name, _, _ in self]

    def of(self, name):
        return [(arguments, keywords) for found, arguments, keywords in self if found == name]


def per_token(value):
    return lambda samples, *_, **__: [(value * s.loss_mask.float(), 0.5 * s.loss_mask.float()) for s in samples]


def make(log, roles=None, statuses=(Status.COMPLETED, Status.TRUNCATED) * 2, values=0.25, sections=None, **algorithm):
    """A trainer of 2 prompts x 2 samples of two tokens; completed ones have reward 1, others 0."""
    settings = {"prompts_per_step": 2, "group_size": 2, "reward": "completed"} | algorithm
    roles = (roles or {}) | ({"critic": {}} if algorithm.get("name") == "ppo" else {})
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": "m", "dtype": "float32"},
            "data": {"train": "t"},
            "trainer": {"steps": 9, "save_every": 9},
            "algorithm": settings,
            "roles": roles,
            "rollout": {"sampling": {"max_new_tokens": 2, "temperature": 0.7}},
        }
        | (sections or {})
    )

    def generate(name, prompts, group_size, tokenizer, seeds):
        samples = []
        for i, status in enumerate(statuses):
            made = Sample.from_response(prompts[i // 2], [2, 3], group_id=i // 2, index=i, status=status)
            made.rollout_logprobs = SERVER * made.loss_mask.float()
            made.policy_version = (fleet.version, fleet.version)
            samples.append(made)
        return samples

    def logprobs(samples, temperature, reference=False):
        assert temperature == 0.7
        return per_token(REFERENCE if reference else TRAINER)(samples)

    update = {"loss": 1.0, "grad_norm": 2.0, "skipped": 0.0}
    update |= {"value_clipped": 1.0, "value_error": 3.0, "clipped": 1.0, "kl_old": 0.5}
    actor = SimpleNamespace(
        logprobs=log.note("logprobs", logprobs),
        capture_reference=log.note("capture_reference"),
        start_train_step=log.note("train actor", lambda *_: lambda: update),
    )
    critic = SimpleNamespace(
        start_values=log.note("values", lambda samples: lambda: [values * s.loss_mask.float() for s in samples]),
        start_train_step=log.note("train critic", lambda *_: lambda: update),
    )
    push = log.note("push", lambda version: {})
    fleet = SimpleNamespace(generate=log.note("generate", generate), push=push, restarts=0, version=0)

    def log_samples(step, samples):
        trainer.logged.extend(sample.reward for sample in samples)

    run = SimpleNamespace(log_samples=log.note("log_samples", log_samples), log_failed=lambda step, failed: None)
    skipped = SimpleNamespace(add=log.note("skip"), count=0)
    prompts = [Prompt([], [1], metadata={"number": i}) for i in range(100)]
    inputs = SimpleNamespace(stream=PromptStream(prompts, 1), tokenizer=None, vocab_size=8)
    console = SimpleNamespace(line=log.note("line"), loud=log.note("loud"))
    critic = critic if config.roles.critic else None
    progress = SimpleNamespace(hold=log.note("hold"), begin_if_due=log.note("save"))
    rewards = scorer(settings["reward"])
    trainer = Trainer(config, inputs, run, console, actor, critic, None, fleet, rewards, skipped, progress)
    trainer.logged = []
    return trainer


def trained_samples(log, role="actor"):
    return sorted(log.of(f"train {role}")[-1][0][0], key=lambda sample: sample.index)


def test_an_iteration_in_its_order():
    log = Log()
    make(log, roles={"reference": {"refresh_every": 1}}, **PPO).step(1)
    scored = ["values", "logprobs", "logprobs"]
    updated = ["hold", "train critic", "train actor", "capture_reference", "save", "push"]
    assert log.names() == ["generate", "log_samples", *scored, *updated]
    assert log.of("push") == [((), {"version": 1})]


def test_rewards_are_logged_as_they_are_and_the_kl_is_taken_off_afterwards():
    trainer = make(log := Log(), name="rloo", kl_coefficient=0.1, kl_target=1.0, kl_horizon=1000)
    trainer.kl.coefficient = 0.2  # adapted
    metrics = trainer.step(1)
    assert trainer.logged == [1.0, 0.0, 1.0, 0.0] and metrics["reward/mean"] == 0.5
    # two tokens, k1 = 0.5 each
    assert [s.reward for s in trained_samples(log)] == pytest.approx([1 - 0.2, 0 - 0.2] * 2)
    ((arguments, _),) = log.of("train actor")
    assert arguments[1].keywords["kl_coefficient"] == 0.0 and metrics["kl/coefficient"] == 0.2
    assert trainer.kl.coefficient < 0.2  # the KL was below its target


def test_a_kl_in_the_loss_is_there_alone_and_with_the_adapted_coefficient():
    trainer = make(log := Log(), kl_coefficient=0.1, kl_target=0.001, kl_horizon=1000)
    trainer.kl.coefficient = 0.2
    trainer.step(1)
    assert [s.reward for s in trained_samples(log)] == [1.0, 0.0] * 2
    assert log.of("train actor")[0][0][1].keywords["kl_coefficient"] == 0.2 and trainer.kl.coefficient > 0.2


def test_the_coefficient_stays_while_only_the_critic_is_trained():
    trainer = make(log := Log(), **PPO, kl_coefficient=0.1, kl_target=0.001, kl_horizon=1000, critic_warmup_steps=1)
    metrics = trainer.step(1)
    assert trainer.kl.coefficient == 0.1 and "train actor" not in log.names() and metrics["critic/value_mean"] == 0.25
    trainer.fleet.version = 1
    trainer.step(2)
    assert trainer.kl.coefficient > 0.1 and "train actor" in log.names()


def test_old_logprobs_are_the_trainers_or_the_servers():
    make(log := Log()).step(1)
    assert {s.old_logprobs[-1].item() for s in trained_samples(log)} == {TRAINER}
    metrics = make(log := Log(), old_logprobs="rollout").step(1)
    assert all(torch.equal(s.old_logprobs, s.rollout_logprobs) for s in trained_samples(log))
    assert [keywords for _, keywords in log.of("logprobs")] == [{"reference": True}]
    assert "entropy" not in metrics and "rollout/logprob_diff_mean" not in metrics and metrics["kl/ref"] > 0


def test_groups_kept_from_the_last_step_keep_the_log_probs_of_the_policy_that_sampled_them():
    trainer = make(log := Log(), dynamic_sampling={}, prompts_per_step=2)
    kept = trainer.collector._round(2, 1, 1, {})[0][:2]
    for sample in kept:
        sample.rollout_logprobs = -3.0 * sample.loss_mask.float()  # far from what the present policy says
    trainer.collector.kept, trainer.fleet.version = [kept], 1
    trainer.step(2)
    old = [s.old_logprobs[-1].item() for s in trained_samples(log)]
    assert old == [-3.0, -3.0, TRAINER, TRAINER]


def test_a_step_of_kept_groups_alone_has_nothing_to_compare():
    equal = (Status.COMPLETED,) * 4
    trainer = make(log := Log(), statuses=equal, dynamic_sampling={"max_rounds": 1})
    kept = trainer.collector._round(2, 1, 1, {})[0][:2]
    kept[0].reward = 0.0
    trainer.collector.kept, trainer.fleet.version = [kept], 1
    metrics = trainer.step(2)
    assert len(trained_samples(log)) == 2 and "rollout/logprob_diff_mean" not in metrics
    assert metrics["dynamic_sampling/missing_groups"] == 1


def test_the_reference_is_refreshed_every_so_many_steps():
    trainer = make(log := Log(), roles={"reference": {"refresh_every": 2, "ema_decay": 0.9}})
    for step in range(1, 6):
        trainer.fleet.version = step - 1
        trainer.step(step)
    assert log.of("capture_reference") == [((0.9,), {})] * 2


def test_a_value_that_is_not_finite_skips_the_step():
    trainer = make(log := Log(), values=float("nan"), **PPO)
    trainer.step(1)
    assert log.of("skip")[0][0][2] == "8 log-probs or values of its samples are not finite"
    assert "train actor" not in log.names() and "push" in log.names()


def test_an_agreement_beyond_its_bound_stops_the_run():
    trainer = make(Log())
    trainer.actor.logprobs = lambda samples, temperature, reference=False: per_token(-1.5)(samples)
    with pytest.raises(RuntimeError, match="rollout/logprob_diff_mean is 0.5, above its limit 0.0001"):
        trainer.step(1)


def test_samples_that_are_too_long_are_out_of_the_loss_and_in_the_statistics():
    trainer = make(log := Log(), name="dapo", dynamic_sampling=None, overlong={"filter": True, "penalty": 0.0})
    metrics = trainer.step(1)
    complete, cut = trained_samples(log)[:2]
    assert not cut.loss_mask.any() and not cut.advantages.any() and metrics["overlong/filtered_ratio"] == 0.5
    assert torch.allclose(complete.advantages[1:], torch.tensor(0.5**0.5))


EQUAL = (Status.TRUNCATED,) * 4


def test_equal_rewards_in_the_first_step_say_loudly_why_nothing_can_be_learnt():
    trainer = make(log := Log(), statuses=EQUAL)
    trainer.step(1)
    (((text,), _),) = log.of("loud")
    assert (
        text.startswith("all 4 rewards are 0: ") and "4 of 4 responses are truncated" in text and "warm start" in text
    )
    trainer.fleet.version = 1
    trainer.step(2)
    assert log.names().count("loud") == 1
    make(log := Log()).step(1)
    assert "loud" not in log.names()


def test_groups_of_equal_rewards_that_differ_between_them_teach_a_group_relative_advantage_nothing():
    statuses = (Status.TRUNCATED,) * 2 + (Status.COMPLETED,) * 2
    make(log := Log(), statuses=statuses).step(1)
    assert "within each of the 2 groups are equal, and grpo compares them there" in log.of("loud")[0][0][0]
    make(log := Log(), statuses=statuses, name="reinforce_plus_plus").step(1)
    assert "loud" not in log.names()


def test_a_part_that_is_only_logged_is_none_that_gdpo_learns_from():
    reward = {"length": {"options": {"high": 9}}, "completed": 0.0}
    make(log := Log(), name="gdpo", reward=reward).step(1)
    assert log.of("loud")[0][0][0].startswith("all 4 rewards are 0: ")


def test_equal_rewards_in_the_first_step_stop_the_run_if_that_is_wanted():
    trainer = make(log := Log(), statuses=EQUAL, sections={"rewards": {"on_constant": "stop"}})
    with pytest.raises(RunError, match="rewards.on_constant: stop: all 4 rewards are 0: "):
        trainer.step(1)
    assert "train actor" not in log.names() and trainer.logged == [0.0] * 4


def test_a_guard_warns_or_stops_the_run():
    for action in ("warn", "stop"):
        sections = {"guards": {"truncated": {"action": action, "patience": 2}}}
        trainer = make(log := Log(), statuses=EQUAL, sections=sections)
        trainer.run.log_metrics, trainer.console.begin = log.note("metrics"), log.note("begin")
        trainer.console.step, trainer.console.memory = log.note("console"), log.note("memory")

        def push(version):
            trainer.fleet.version = version
            return {}

        trainer.fleet.push = log.note("push", push)
        progress = trainer.progress
        progress.step, progress.steps, progress.validate = 0, lambda: range(1, 10), log.note("validate")
        progress.following = lambda loop, roles: nullcontext()
        progress.reached = log.note("reached")
        with pytest.raises(RunError) if action == "stop" else nullcontext() as error:
            trainer.run_all()
        warnings = [text for (text,), _ in log.of("line") if "guards.truncated" in text]
        steps = [metrics for (metrics,), _ in log.of("metrics")]
        assert steps[0]["guards/alarms"] == 0 and steps[1]["guards/alarms"] == 1
        if action == "stop":
            assert "guards.truncated" in str(error.value) and len(steps) == 2 and not warnings
        else:
            assert len(warnings) == 1 and len(steps) == 9
            assert [step for (step,), _ in log.of("reached")] == list(range(1, 10))
