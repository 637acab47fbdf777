"""The config's `monitor` section: where the metrics go besides metrics.jsonl."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.config_section import Section
from megarl.config_violation import Violation, in_yaml
from megarl.errors import ConfigError
from megarl.machine import why_address_unusable

if TYPE_CHECKING:
    from megarl.config import Config


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "megarl"
    entity: str | None = Field(None, description="a user or a team; null: that of the key in WANDB_API_KEY or ~/.netrc")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: into RUN/wandb, which `wandb sync` uploads later"
    )
    group: str | None = Field(None, description="what its page puts together; null: none")
    tags: list[str] = Field([], description="of 1 to 64 characters")


class PrometheusConfig(Section):
    """An HTTP server in the trainer's process that answers /metrics."""

    port: int = Field(0, ge=0, le=65535, description="0: a free one, which the console tells")
    host: str = Field("127.0.0.1", min_length=1, description="an address of this machine; 0.0.0.0: all of them")


class MonitorConfig(Section):
    """Each of them is left out, with a warning, where it fails: a run never stops for it."""

    tensorboard: bool = Field(False, description="event files in RUN/tensorboard")
    wandb: WandbConfig | None = Field(None, description="null: none; {}: with the defaults")
    prometheus: PrometheusConfig | None = Field(None, description="null: none; {}: on a free port")


def check_monitor(config: "Config") -> Iterator[Violation]:
    wandb, prometheus = config.monitor.wandb, config.monitor.prometheus
    if wandb is not None and not re.fullmatch(r"[^/\\#?%:]{1,128}", wandb.project):
        text = f"given {in_yaml(wandb.project)}, allowed: 1 to 128 characters, none of / \\ # ? % :"
        yield Violation(text, ("monitor.wandb.project",))
    if wandb is not None and (odd := [tag for tag in wandb.tags if not 1 <= len(tag) <= 64]):
        yield Violation(f"given {in_yaml(odd)}, allowed: tags of 1 to 64 characters", ("monitor.wandb.tags",))
    if prometheus is None or config.cluster.ray_address is not None:  # servers may be on other machines
        return
    for section, servers in config.servers.items():
        if prometheus.port in (servers.ports or []):
            text = f"given {prometheus.port}, which is in {section}.ports too; valid: another one, or 0"
            yield Violation(text, ("monitor.prometheus.port", f"{section}.ports", "algorithm.name"))


def refuse_taken_port(config: "Config") -> None:
    """Raise ConfigError where monitor.prometheus could not listen right now. For a run that is about to start: another
    command may look at the config of a run that has the port."""
    prometheus = config.monitor.prometheus
    if prometheus is None:
        return
    if reason := why_address_unusable(prometheus.host, prometheus.port):
        port = f"port {prometheus.port}" if prometheus.port else "a free port"
        text = f"monitor.prometheus.port: {port} of {prometheus.host} (monitor.prometheus.host) {reason}; valid: a "
        raise ConfigError(f"{text}port that is free, or 0, at an address of this machine")
