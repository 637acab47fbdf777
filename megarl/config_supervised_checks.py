"""What sft, dpo, ipo and reward_model allow: they read the rows of data.train, and have neither servers nor rewards."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config_unread import Unread, unread
from megarl.config_violation import Violation
from megarl.presets import WITH_REFERENCE

if TYPE_CHECKING:
    from megarl.config import Config

READ = ("prompts_per_step", "group_size", "mini_batch_size")
PREFERENCE_READERS = {"beta": WITH_REFERENCE, "label_smoothing": ("dpo",), "center": ("reward_model",)}


def check_unread(config: "Config") -> Iterator[Violation]:
    yield from unread(config, _reasons(config))


def _reasons(config: "Config") -> Unread:
    algorithm = config.algorithm
    name = f"algorithm.name: {algorithm.name}"
    starts_no_servers = f"{name} starts no servers"
    reasons = {
        "placement": starts_no_servers,
        "rollout": starts_no_servers,
        "sync": starts_no_servers,
        "debug.sync_checksum": starts_no_servers,
        "debug.shuffle_rewards": f"{name} has no rewards",
        "rewards": f"{name} has no rewards",
        "guards": f"{name} has no guards: they look at rewards and at what is generated",
        "roles.reward_model": f"{name} has no rewards",
        "roles.reward_server": f"{name} has no rewards",
        "data.answer_key": f"{name} has no rewards",
        "evaluation": f"{name} generates no responses",
        "trainer.num_logged_samples": f"{name} generates no samples",
        "roles.critic": f"{name} trains no critic",
        "roles.teacher": f"{name} has no teacher",
        "algorithm.epochs": f"with {name} trainer.steps counts the steps, and data.train is read as often as they need",
    }
    if algorithm.name == "sft":
        reasons["warm_start"] = "algorithm.name: sft is no start of something: give its rows as data.train"
    else:
        reasons["warm_start"] = f"{name} has none: run algorithm.name: sft first and start from its export (model.path)"
    if config.roles.actor.offload != "none":  # which is what happens
        reasons["roles.actor.offload"] = f"with {name} nothing else needs the actor's GPUs"
    keeps = "keeps its reference" if algorithm.name in WITH_REFERENCE else "has no reference"
    reasons |= {f"roles.reference.{key}": f"{name} {keeps}" for key in ("refresh_every", "ema_decay")}
    for key in ("response_key",) if algorithm.has_pairs else ("chosen_key", "rejected_key"):
        reasons[f"data.{key}"] = f"{name} has rows of {'a pair' if algorithm.has_pairs else 'one response'}"
    read = [f"algorithm.{key}" for key in READ]
    if algorithm.has_pairs:
        for key, names in PREFERENCE_READERS.items():
            if algorithm.name in names:
                read.append(f"algorithm.preference.{key}")
            else:
                wanted = " or ".join(names)
                why = f"only algorithm.name: {wanted} reads it, and that is {algorithm.name}"
                reasons[f"algorithm.preference.{key}"] = why
    else:
        read.append("algorithm.loss_aggregation")
        if algorithm.loss_aggregation == "constant":
            read.append("algorithm.aggregation_length")
        else:
            why = f"only algorithm.loss_aggregation: constant reads it, and that is {algorithm.loss_aggregation}"
            reasons["algorithm.aggregation_length"] = why
    reasons["algorithm"] = f"{name} learns from the rows of data.train alone"
    return dict.fromkeys(read) | {key: (why, "algorithm.name") for key, why in reasons.items()}


def check_rows(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    group, wanted = algorithm.group_size, algorithm.preset.group_size
    if group != wanted:
        text = f"given {group}, but for {algorithm.name} a row of data.train is {wanted} sample(s); valid: {wanted}"
        yield Violation(text, ("algorithm.group_size",))


def check_constant(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.name == "sft" and algorithm.loss_aggregation == "constant" and algorithm.aggregation_length is None:
        text = "null, but without servers there is no rollout.sampling.max_new_tokens to divide by; give a number of "
        text += "tokens, or loss_aggregation: token_mean"
        yield Violation(text, ("algorithm.aggregation_length", "algorithm.loss_aggregation"))


def check_reference(config: "Config") -> Iterator[Violation]:
    name = config.algorithm.name
    if name in WITH_REFERENCE and not config.roles.reference.enabled:
        text = f"given false, but {name} compares the policy with the reference; valid: true"
        yield Violation(text, ("roles.reference.enabled",))


SUPERVISED_CHECKS = (check_unread, check_rows, check_constant, check_reference)
