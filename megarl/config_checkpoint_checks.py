"""What the keys of checkpoints, early stop and recorded samples need and exclude."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config_violation import Violation

if TYPE_CHECKING:
    from megarl.config import Config


def check_checkpoint_roles(config: "Config") -> Iterator[Violation]:
    switches = config.checkpoint.roles
    if not any(getattr(switches, name) for name in config.roles.trained):
        given = " and ".join(f"{name}: false" for name in config.roles.trained)
        yield Violation(f"given {given}: nothing would be saved", ("checkpoint.roles",))


def check_validations(config: "Config") -> Iterator[Violation]:
    """Who needs validations."""
    checkpoint, trainer = config.checkpoint, config.trainer
    needs = {
        "trainer.early_stop": trainer.early_stop is not None,
        "checkpoint.keep_best": checkpoint.keep_best > 0,
        "checkpoint.metric": checkpoint.metric is not None,
    }
    for key, is_given in needs.items():
        if is_given and not config.data.validation:
            yield Violation("given, but without data.validation there are no validations", (key, "data.validation"))
        elif is_given and trainer.evaluate_every == 0:
            text = "given, but trainer.evaluate_every is 0: there are validations before and after the run only"
            yield Violation(text, (key, "trainer.evaluate_every"))
    if checkpoint.metric is not None and not checkpoint.metric.startswith("validation/"):
        text = f"given {checkpoint.metric}, but it names a metric of a validation; valid: validation/..."
        yield Violation(text, ("checkpoint.metric",))


def check_retention(config: "Config") -> Iterator[Violation]:
    if config.checkpoint.keep_every and config.checkpoint.keep_last is None:
        text = f"given {config.checkpoint.keep_every}, but checkpoint.keep_last is null: all checkpoints stay"
        yield Violation(text, ("checkpoint.keep_every", "checkpoint.keep_last"))


def check_recorded(config: "Config") -> Iterator[Violation]:
    rollout, debug = config.rollout, config.debug
    if rollout.save and rollout.replay:
        text = f"given {rollout.save}, but with rollout.replay nothing is generated that could be saved"
        yield Violation(text, ("rollout.save", "rollout.replay"))
    if rollout.replay and debug.sync_checksum:
        text = "given true, but with rollout.replay there are no servers to compare with"
        yield Violation(text, ("debug.sync_checksum", "rollout.replay"))
    if debug.generate_only:
        if config.algorithm.is_supervised:
            text = f"given true, but algorithm.name: {config.algorithm.name} generates nothing"
            yield Violation(text, ("debug.generate_only", "algorithm.name"))
        elif rollout.replay or not rollout.save:
            text = "given true: it needs a folder in rollout.save, and rollout.replay null"
            yield Violation(text, ("debug.generate_only", "rollout.save"))


CHECKPOINT_CHECKS = (check_checkpoint_roles, check_validations, check_retention, check_recorded)
