"""What an algorithm allows: the arithmetic of its batch, and the checks of its kind."""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from megarl.config_rl_checks import RL_CHECKS
from megarl.config_role_checks import LAYOUT_KEYS
from megarl.config_supervised_checks import SUPERVISED_CHECKS
from megarl.config_unread import unread
from megarl.config_violation import Violation, divisors, nearest_multiples, nearest_two

if TYPE_CHECKING:
    from megarl.config import Config


def check_algorithm(config: "Config") -> Iterator[Violation]:
    """All violations rest on algorithm.name too: its preset fills the keys."""
    own = SUPERVISED_CHECKS if config.algorithm.is_supervised else RL_CHECKS
    for find in (*COMMON_CHECKS, *own):
        for violation in find(config):
            yield replace(violation, keys=(*violation.keys, "algorithm.name"))


def check_unread(config: "Config") -> Iterator[Violation]:
    if config.data.validation is None:
        why = ("data.validation is null: there are no held-out rows", "data.validation")
        yield from unread(config, {"trainer.evaluate_every": why, "trainer.evaluate_prompts": why})


def check_batch(config: "Config") -> Iterator[Violation]:
    """The samples of a step in mini-batches, of those whole pairs, on the data-parallel ranks of each role."""
    algorithm = config.algorithm
    prompts, group, mini = algorithm.prompts_per_step, algorithm.group_size, algorithm.mini_batch_size
    samples, unit = algorithm.samples_per_step, 2 if algorithm.has_pairs else 1
    keys = ("algorithm.mini_batch_size", "algorithm.prompts_per_step", "algorithm.group_size")
    if group % unit:
        return  # and no pairs, which another check says
    ranks = max(role.data_parallel for role in config.roles.trained.values())
    if mini is not None and (samples % mini or mini % unit):
        valid = [unit * size for size in divisors(samples // unit) if size >= ranks]
        text = f"given {mini}, but algorithm.prompts_per_step * algorithm.group_size = {prompts} * {group} = {samples} "
        text += "is not a multiple of it" if samples % mini else "is to be divided into whole pairs"
        if valid:
            text += f"; nearest valid mini_batch_size: {nearest_two(mini, valid)}"
        if mini % unit == 0 and mini >= unit * ranks:
            text += f"; nearest valid prompts_per_step: {nearest_multiples(prompts, mini // gcd(mini, group))}"
        yield Violation(text, keys)
        return
    words = "pairs" if algorithm.has_pairs else "samples"
    for name, role in config.roles.trained.items():
        if (taken := algorithm.samples_per_update // unit) < role.data_parallel:
            yield Violation(
                f"an update has {taken} {words} (prompts_per_step {prompts}, group_size {group}, mini_batch_size "
                f"{'null' if mini is None else mini}), fewer than the {role.data_parallel} data-parallel ranks "
                f"(roles.{name}: {role.sizes}); at least {role.data_parallel} {words} are needed",
                keys + tuple(f"roles.{name}.{key}" for key in LAYOUT_KEYS),
            )


COMMON_CHECKS = (check_unread, check_batch)
