"""Which changes of a config between two parts of a run change what is learnt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megarl.config import Config, RoleConfig
from megarl.config_errors import covers
from megarl.config_file import Loader
from megarl.config_violation import in_yaml

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
    "evaluation",
    "cluster",
    "debug.sync_checksum",
    "debug.generate_only",
    "data.validation",
    *(f"trainer.{key}" for key in ("evaluate_every", "evaluate_prompts", "early_stop", "save_every")),
    *(f"trainer.{key}" for key in ("max_skipped_updates", "num_logged_samples")),
    *(f"rollout.{key}" for key in ("servers", "tensor_parallel", "ports", "cpus_per_server", "server_args")),
    *(f"rollout.{key}" for key in ("start_timeout_s", "max_restarts", "request_timeout_s", "max_retries")),
    *(f"rollout.{key}" for key in ("max_concurrent_prompts", "logprob_diff_limit", "save")),
)
LAYOUT = tuple(key for key in RoleConfig.model_fields if key not in ("optimizer", "lora"))


def changes(config: Config, saved: dict) -> list[str]:
    """A line for each key that changes what is learnt and is not as in `saved`, the tree of an earlier config.

    A key that the earlier one does not have was then as the schema has it now.
    """
    now = config.model_dump(mode="json")
    required = {"name": config.name, "model": config.model, "data": {"train": config.data.train}}
    usual = Config(**required, algorithm={"name": config.algorithm.name}).model_dump(mode="json")
    free = [*FREE, *(f"roles.{role}.{key}" for role in config.roles.megatron for key in LAYOUT)]
    if all(role.optimizer.schedule == "constant" for role in config.roles.trained.values()):
        free.append("trainer.steps")
    return [
        f"{key}: {in_yaml(value)}, and {in_yaml(before)} where it was saved"
        for key, value, before in _differing(now, saved, usual)
        if not covers(free, key)
    ]


def read(file: Path) -> dict:
    """The tree of a resolved config that `megarl.config_file.dump` wrote."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader)


def _differing(now: dict, saved: dict, usual: dict, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, its value now, its value before)."""
    for name in dict.fromkeys([*now, *saved]):
        value, before = now.get(name), saved.get(name, usual.get(name))
        if isinstance(value, dict) and isinstance(before, dict):
            below = usual.get(name)
            yield from _differing(value, before, below if isinstance(below, dict) else {}, f"{prefix}{name}.")
        elif value != before:
            yield prefix + name, value, before
