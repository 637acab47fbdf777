"""Weights & Biases, in a process of its own (wandb_child.py): its client has exit hooks that wait for the network, and a
process can be ended at any time."""

import json
import os
import re
import secrets
import select
import subprocess
import sys
from typing import TYPE_CHECKING

from megarl.errors import RunError

if TYPE_CHECKING:
    from megarl.monitor.run_directory import RunDirectory
    from megarl.monitor.sinks import Sinks

UPLOAD_S = 25.0  # after the run's end, for what is not sent yet; less than sinks.CLOSE_S
RUN_ID = "wandb_run_id"  # file in the run directory


class Wandb:
    def __init__(self, run: "RunDirectory", sinks: "Sinks"):
        self.report = sinks.report
        settings = run.config.monitor.wandb
        self.folder = run.path / "wandb"
        self.log_path = run.logs / "wandb.log"
        init = settings.model_dump(include={"project", "entity", "mode", "group", "tags"})
        init |= {"name": run.config.name, "id": self._run_id(run), "resume": "allow", "dir": str(run.path.resolve())}
        init["config"] = run.config.model_dump(mode="json") | {"env": run.about}
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "megarl.monitor.sinks.wandb_child", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # no Ctrl-C of the terminal's: it ends when this one says so
            )
        self._send(init)

    @staticmethod
    def _run_id(run: "RunDirectory") -> str:
        """A run that goes on from a checkpoint of its own goes on there; one that begins again is a new one."""
        file = run.path / RUN_ID
        if run.resumed_step < 0 or not file.exists():
            file.write_text(secrets.token_hex(8) + "\n")
        return file.read_text().strip()

    def log(self, metrics: dict) -> None:
        self._send(metrics)
        address = self._child.stdout
        if not address.closed and select.select([address], [], [], 0)[0]:  # the child has said it, or has none
            if page := address.readline().decode().strip():
                self.report(f"the run at Weights & Biases: {page}")
            address.close()

    def close(self, failed: bool) -> None:
        try:
            self._send({"exit_code": int(failed)})
            self._child.stdin.close()
            if self._child.wait(UPLOAD_S) != 0:
                raise RunError(self._last_words())
        except subprocess.TimeoutExpired:
            text = f"not all was sent {UPLOAD_S:g} s after the run's end; `wandb sync {self.folder}` sends the rest"
            raise RunError(text) from None
        finally:
            self._child.kill()
            self._child.wait()

    def _send(self, line: dict) -> None:
        try:
            self._child.stdin.write(json.dumps(line).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise RunError(self._last_words()) from None

    def _last_words(self) -> str:
        """Of a child that is gone, or is about to be."""
        code = self._child.wait(UPLOAD_S)
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        return f"its process ended with code {code}: {errors[-1] if errors else 'no error'} (log {self.log_path})"
