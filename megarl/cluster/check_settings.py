"""The options of `megarl check`, with or without a config file."""

import argparse
from pathlib import Path

from megarl import config_file
from megarl.config import Config, load
from megarl.config_checks import check_ray_address
from megarl.config_errors import validate
from megarl.config_file import Document
from megarl.errors import ConfigError
from megarl.machine import resolve_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "YAML file of a run whose models, run directory and room are looked at too; keys anew"
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG] key.path=value", help=text)
    text = "HOST:PORT of a Ray cluster, or auto for this node's; default: the config's, else this machine alone"
    parser.add_argument("--ray-address", metavar="ADDRESS", help=text)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each step; default: 60")


def read_options(options: argparse.Namespace) -> tuple[Config, str | None, bool]:
    """(The config, the device or None where the cluster is to tell, whether the config is that of a run). Raises
    ConfigError."""
    if not options.timeout > 0:
        raise ConfigError(f"--timeout {options.timeout:g}: wanted more than 0 seconds")
    overrides = options.overrides
    if overrides and ("=" not in overrides[0] or Path(overrides[0]).is_file()):
        config = load(overrides[0], overrides[1:])
        return config, resolve_device(config), True
    document, seen = Document("megarl check"), {}
    for override in overrides:
        config_file.apply_override(override, document, seen)
    # What every config needs, and nothing here looks at.
    document.tree = {"name": "check", "model": {"path": "."}, "data": {"train": "."}} | document.tree
    config = validate(Config, document)
    lines = [document.line(violation.text, *violation.keys) for violation in check_ray_address(config)]
    if lines := document.problems + lines:
        raise ConfigError("\n".join(lines))
    asks_cluster = config.device == "auto" and config.cluster.ray_address is not None
    return config, None if asks_cluster else resolve_device(config), False
