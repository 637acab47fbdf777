"""What the guards allow: thresholds that leave a band, of metrics that the run has."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config_unread import Unread, unread
from megarl.config_violation import Violation

if TYPE_CHECKING:
    from megarl.config import Config


def check_guards(config: "Config") -> Iterator[Violation]:
    high, low = config.guards.kl.high, config.guards.kl.low
    if high is not None and low is not None and low >= high:
        text = f"given {low:g}, but guards.kl.high is {high:g}: between them is no band; valid: less than that"
        yield Violation(text, ("guards.kl.low", "guards.kl.high"))
    yield from unread(config, without_metrics(config))


def without_metrics(config: "Config") -> Unread:
    """The guards that would never say anything in this run."""
    algorithm = config.algorithm
    reasons: Unread = {}
    if not config.roles.reference.enabled:
        why = "roles.reference.enabled is false: there is no kl/ref"
        reasons["guards.kl"] = (why, "roles.reference.enabled")
    if algorithm.old_logprobs == "rollout":
        why = "with algorithm.old_logprobs: rollout the trainer scores nothing"
        reasons |= dict.fromkeys(("guards.entropy", "guards.mismatch"), (why, "algorithm.old_logprobs"))
    if config.data.validation is None:
        reasons["guards.reward_hacking"] = ("data.validation is null: there is no held-out reward", "data.validation")
    elif (number := num_validations(config)) < 3:
        why = f"it speaks from the third validation on, and with this trainer.evaluate_every the run has {number}"
        reasons["guards.reward_hacking"] = (why, "trainer.evaluate_every")
    if algorithm.group_size == 1:
        reasons["guards.duplicates"] = ("algorithm.group_size is 1: there are no groups", "algorithm.group_size")
    if algorithm.advantage == "distillation":
        why = "distillation learns from the teacher's log-probs alone"
        reasons["guards.constant_reward"] = (why, "algorithm.advantage")
    if not algorithm.reward:
        no_rewards = ("algorithm.reward is null: there are no rewards", "algorithm.reward")
        reasons |= {f"guards.{name}": no_rewards for name in ("constant_reward", "duplicates", "reward_hacking")}
    return reasons


def num_validations(config: "Config") -> int:
    """Before the first step, and when they are due."""
    trainer = config.trainer
    return 1 + sum(trainer.is_due(step, trainer.evaluate_every) for step in range(1, trainer.steps + 1))
