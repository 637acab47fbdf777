"""runs/NAME/: config.yaml, env.json, metrics.jsonl, samples.jsonl, logs/, checkpoints/, and if need be
failed_rewards.jsonl, skipped/ and what sinks write."""

import importlib.metadata
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint.folder import last_good, remove_leftovers, set_aside_newer
from megarl.cluster.run_tag import new_run_id
from megarl.config import Config
from megarl.config_file import dump
from megarl.errors import RunError
from megarl.monitor.sinks import Sinks
from megarl.run_lock import locked
from megarl.sample import Sample

if TYPE_CHECKING:
    from megarl.checkpoint.resume import Resume

PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "numpy")


class RunDirectory:
    """Owns the files of one run; each line is on disk when its call returns. RunError where one cannot be written."""

    def __init__(
        self,
        config: Config,
        command: list[str],
        device: str,
        resume: "Resume | None" = None,
        report: Callable[[str], None] = print,
    ):
        """What there is of later steps than those that `resume` goes on from is set aside. `report` gets what the sinks
        have to say."""
        self.config = config
        self.path = config.run_path
        self.run_id = new_run_id(config.name)
        with self._writing(""):
            for folder in ("logs", "checkpoints"):
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.path)
            step = resume.step if resume else None
            self.resumed_step = -1 if step is None else step  # the last one that this start of the run does not do
            for name in ("metrics.jsonl", "samples.jsonl", "failed_rewards.jsonl"):
                keep_steps(self.path / name, step)
            self.set_aside = set_aside_newer(self.path, self.resumed_step)
            remove_leftovers(self.path / "checkpoints")
            (self.path / "config.yaml").write_text(dump(config.model_dump(mode="json")), encoding="utf-8")
            about = {"run_id": self.run_id, "resumed_from": str(resume.folder) if resume else None}
            about |= environment(command, config.seed, device) | {"earlier": earlier_starts(self.path / "env.json")}
            self.about = about
            (self.path / "env.json").write_text(json.dumps(about, indent=2) + "\n")
            self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)
            # a lone surrogate as JSON has it
            self._samples = open(
                self.path / "samples.jsonl", "a", buffering=1, encoding="utf-8", errors="backslashreplace"
            )
        self.sinks = Sinks(self, report)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def log_metrics(self, metrics: dict) -> None:
        with self._writing("metrics.jsonl"):
            self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")
        self.sinks.log(metrics)

    def log_samples(self, step: int, samples: list[Sample]) -> None:
        for sample in samples:
            row = {
                "step": step,
                "group": sample.group_id,
                "messages": sample.prompt.messages,
                "tools": sample.prompt.tools,
                "response": sample.response_text,
                "answer": sample.prompt.answer,
                "reward": sample.reward,
                "reward_parts": sample.reward_parts,
                "status": sample.status.value,
                "policy_version": sample.policy_version,
                "source": sample.prompt.metadata.get("source"),
            }
            with self._writing("samples.jsonl"):
                self._samples.write(json.dumps(row, ensure_ascii=False) + "\n")

    def log_failed(self, step: int, failed: list[tuple[Sample, str]]) -> None:
        """Samples that were dropped as their reward failed, into a file that is there only where there are some."""
        if not failed:
            return
        name = "failed_rewards.jsonl"
        with self._writing(name), open(self.path / name, "a") as file:
            for sample, reason in failed:
                row = {"step": step, "group": sample.group_id, "source": sample.prompt.metadata.get("source")}
                row |= {"response": sample.response_text, "answer": sample.prompt.answer, "error": reason}
                file.write(json.dumps(row) + "\n")

    def dump_batch(self, name: str, samples: list[Sample]) -> Path:
        """Samples with all their tensors, for `torch.load(file, weights_only=False)`."""
        file = self.path / "skipped" / f"{name}.pt"
        with self._writing(f"skipped/{file.name}"):
            file.parent.mkdir(exist_ok=True)
            with open(file, "wb") as stream:
                torch.save(samples, stream)
        return file

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception) -> None:
        self.sinks.close(failed=exception[0] is not None)
        for stream in (self._metrics, self._samples, self._lock):
            with suppress(OSError):  # again, of a line that could not be written: that was said
                stream.close()

    @contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch does not say why
            if not isinstance(cause, OSError):
                raise
            text = f"{self.path / name} cannot be written: {cause.strerror}; {last_good(self.path)}"
            raise RunError(text) from error


def keep_steps(file: Path, step: int | None) -> None:
    """Move a file's lines of steps after this one, and those that are broken or cut off, to NAME.superseded.jsonl;
    None: all.

    Lines without a step, of a warm start, stay.
    """
    if not file.exists():
        return
    whole = file.with_name(file.name + ".kept")
    moved = []
    with open(file, "rb") as lines, open(whole, "wb") as kept:  # bytes: text may hold other ends of lines
        for line in lines:
            if step is not None and step_in(line) <= step:
                kept.write(line)
            else:
                moved.append(line)
    if moved:
        with open(file.with_suffix(".superseded.jsonl"), "ab") as superseded:
            superseded.writelines(line.rstrip(b"\n") + b"\n" for line in moved)
        os.replace(whole, file)
    else:
        whole.unlink()


def step_in(line: bytes) -> float:
    """Infinite where the line is broken or cut off."""
    try:
        return json.loads(line).get("step", 0) if line.endswith(b"\n") else math.inf
    except (ValueError, AttributeError):
        return math.inf


def earlier_starts(file: Path) -> list[dict]:
    """What env.json said of the starts of this run before, the first one first."""
    try:
        before = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return []
    return [*before.pop("earlier", []), before]


def environment(command: list[str], seed: int, device: str) -> dict:
    """What someone needs to know to run this again."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "seed": seed,
        "device": device,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "git": _git("rev-parse", "HEAD"),
        "git_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def version(name: str) -> str | None:
    """Of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Of the source tree; None where megarl is not run from one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
