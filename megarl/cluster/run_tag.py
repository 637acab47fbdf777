"""The tag of a run: all that a run starts carries it, and it tells whether the run's trainer still lives."""

import os
import re
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_VARIABLE = "MEGARL_RUN_ID"
TRAINER_VARIABLE = "MEGARL_TRAINER"
RUN_ID = r"megarl-\w[\w.-]*-[0-9a-f]{8}"


def new_run_id(name: str) -> str:
    return f"megarl-{name}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True)
class RunTag:
    run_id: str
    machine: str  # the trainer's: host, boot and pid namespace; its pid means nothing elsewhere
    user: int
    pid: int
    started: int  # in clock ticks since boot: a pid is used again

    @classmethod
    def of_this_process(cls, run_id: str) -> "RunTag":
        """The tag of a run whose trainer is this process."""
        return cls(run_id, this_machine(), os.getuid(), os.getpid(), start_ticks(os.getpid()))

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "RunTag | None":
        """From what `variables` returned; None where it holds no tag."""
        run_id = re.fullmatch(RUN_ID, variables.get(RUN_VARIABLE, ""))
        trainer = re.fullmatch(r"(.+):(\d+):(\d+):(\d+)", variables.get(TRAINER_VARIABLE, ""))
        if not run_id or not trainer:
            return None
        machine, *numbers = trainer.groups()
        return cls(run_id[0], machine, *map(int, numbers))

    @property
    def variables(self) -> dict[str, str]:
        """For an environment, a Ray job's metadata or a file."""
        return {RUN_VARIABLE: self.run_id, TRAINER_VARIABLE: f"{self.machine}:{self.user}:{self.pid}:{self.started}"}

    def trainer_lives(self) -> bool | None:
        """None: it runs, or ran, where this process cannot see it."""
        return start_ticks(self.pid) == self.started if self.machine == this_machine() else None

    def __str__(self) -> str:
        return f"{self.run_id} (trainer: process {self.pid} on {self.machine.partition('/')[0]})"


def this_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None where there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
