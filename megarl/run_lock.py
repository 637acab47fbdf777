"""The lock that a run holds on its directory until it ends. Without torch: it is asked before anything is started."""

import fcntl
from pathlib import Path
from typing import TextIO

from megarl.errors import ConfigError

LOCK = ".lock"


def locked(run_path: Path) -> TextIO:
    """The lock's file, locked until it is closed or this process ends. ConfigError where another process has it."""
    opened = open(run_path / LOCK, "w")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        raise ConfigError(f"name: {run_path} is in use by a run that has not ended") from None
    return opened


def refuse_in_use(run_path: Path) -> None:
    """ConfigError where a run there has not ended; no file is made."""
    if (run_path / LOCK).exists():
        locked(run_path).close()
