"""Run the command line as a user does, and look for anything that it leaves behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIES_WITH_THE_TEST = """
import os, signal, sys
from megarl.rollout.launch import die_with_parent
die_with_parent(os.getppid(), signal.SIGTERM)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite that runs in the background hands on an ignored one
from megarl.cli import main
sys.exit(main())
"""
TAG = "MEGARL_TEST_RUN"  # in the environment of a run and so of all its descendants


class Run:
    """`megarl train ...`, or another command, as a child; use as a context, which fails if any process or shared memory
    outlives it.

    `inside` is a command that runs the command after it, elsewhere.
    """

    def __init__(self, folder: Path, *arguments: str, inside: tuple[str, ...] = (), command: str = "train"):
        self.folder = folder
        self.was_killed = False
        self.tag = uuid.uuid4().hex
        self.shared_memory = shared_memory()
        self.output_path = folder / "output.txt"
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {TAG: self.tag}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self.output_path, "wb") as output:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-c", DIES_WITH_THE_TEST, command, *arguments],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exception) -> None:
        self.process.kill()
        self.process.wait()
        left = wait_until(lambda: not self.descendants(), 30) or self.descendants()
        was_killed = self.was_killed
        self.kill_all()
        if exception == (None, None, None) and not was_killed:
            assert left is True, f"processes outlived the run: {left}"
            assert wait_until(lambda: shared_memory() <= self.shared_memory, 10), shared_memory() - self.shared_memory

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """The exit code; fails with the output where the run takes longer."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def wait_for_step(self, path: Path, step: int, timeout_s: float) -> None:
        assert wait_until(
            lambda: self.process.poll() is not None or any(m["step"] >= step for m in steps(path)), timeout_s
        ), self.output
        assert self.process.poll() is None, self.output

    def kill_all(self) -> None:
        """SIGKILL to all processes of the run, as when a machine fails: none is left to clear up behind the others."""
        self.was_killed = True
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def descendants(self) -> dict[int, str]:
        return tagged_processes(self.tag)


def run_tool(name: str, *arguments: str, folder: Path) -> str:
    """The output of a script of tools/, called in `folder`; fails with it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tagged_processes(tag: str, variable: str = TAG) -> dict[int, str]:
    """pid -> command line of every living process with the tag in this variable of its environment."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{variable}={tag}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return found


def steps(run_path: Path) -> list[dict]:
    """The lines of metrics.jsonl that are RL steps."""
    file = run_path / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if "reward/mean" in line]


def untimed(metrics: Path) -> list[dict]:
    """The lines of a metrics.jsonl without what two equal runs differ in: times, and what only servers have."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    other = ("time/", "perf/", "sync/", "reward/latency")
    return [{key: value for key, value in line.items() if not key.startswith(other)} for line in lines]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def wait_until(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
