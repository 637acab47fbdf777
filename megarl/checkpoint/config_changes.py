"""Which changes of a config between two parts of a run change what is learnt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_jsonable_python

from megarl.config import Config, LayoutConfig, ServersConfig
from megarl.config_errors import covers, field_at, mapping_around, value_at
from megarl.config_file import Loader
from megarl.config_violation import in_yaml

TRAINED_ROLE = (
    "overlap_grad_reduce",
    "recompute",
    "recompute_modules",
    "offload",
    "host_optimizer",
)  # besides its layout
# Keys and sections that change nothing but where, how fast and how watched it is learnt, up to rounding.
FREE = (
    "name",
    "run_directory",
    "device",
    "placement",
    "model.transformer_impl",
    *(f"rewards.{key}" for key in ("num_workers", "max_concurrent", "on_constant")),
    "sync",
    "checkpoint",
    "guards",
    "monitor",
    "evaluation",
    "cluster",
    "debug.sync_checksum",
    "debug.generate_only",
    "data.validation",
    *(f"trainer.{key}" for key in ("evaluate_every", "evaluate_prompts", "early_stop", "save_every")),
    *(f"trainer.{key}" for key in ("max_skipped_updates", "num_logged_samples")),
    *(f"roles.{role}.{key}" for role in ("actor", "critic", "reward_model") for key in LayoutConfig.model_fields),
    *(f"roles.{role}.{key}" for role in ("actor", "critic") for key in TRAINED_ROLE),
    *(f"roles.{role}.{key}" for role in ("teacher", "reward_server") for key in ServersConfig.model_fields),
    *(f"rollout.{key}" for key in ServersConfig.model_fields),
    *(f"rollout.{key}" for key in ("max_restarts", "request_timeout_s", "max_retries")),
    *(f"rollout.{key}" for key in ("max_concurrent_prompts", "logprob_diff_limit", "save")),
)


def changes(config: Config, saved: dict) -> list[str]:
    """A line for each key that changes what is learnt and is not as in `saved`, the tree of an earlier config.

    A key that the earlier one does not have was then as the schema has it now.
    """
    required = {"name": config.name, "model": config.model, "data": {"train": config.data.train}}
    usual = Config(**required, algorithm={"name": config.algorithm.name}).model_dump(mode="json")
    free = list(FREE)
    if all(role.optimizer.schedule == "constant" for role in config.roles.trained.values()):
        free.append("trainer.steps")
    return [
        f"{key}: {in_yaml(value)}, and {in_yaml(before)} where it was saved"
        for key, value, before in _differing(config.model_dump(mode="json"), saved, usual)
        if not covers(free, key)
    ]


def read(file: Path) -> dict:
    """The tree of a resolved config that `megarl.config_file.dump` wrote."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader)


def _differing(now: dict, saved: dict, usual: dict, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, its value now, its value before). `usual`: the whole tree of keys that nobody gives."""
    for name in dict.fromkeys([*now, *saved]):
        key = prefix + name
        value, before = now.get(name), saved[name] if name in saved else _usual(usual, key)
        if isinstance(value, dict) and isinstance(before, dict):
            yield from _differing(value, before, usual, f"{key}.")
        elif value != before:
            yield key, value, before


def _usual(usual: dict, key: str) -> Any:
    """None for what a mapping holds, such as a reward: it was not there."""
    if mapping_around(Config, key) is not None:
        return None
    try:
        return value_at(usual, key)
    except (KeyError, TypeError):  # of a section that is null where nobody gives it, or no key any more
        field = field_at(Config, key)
        return to_jsonable_python(field.get_default(call_default_factory=True)) if field else None
