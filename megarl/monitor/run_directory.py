"""runs/NAME/: config.yaml, env.json, metrics.jsonl, samples.jsonl, logs/, checkpoints/, and if need be
failed_rewards.jsonl and skipped/."""

import importlib.metadata
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.checkpoint.folder import remove_leftovers, set_aside_newer
from megarl.cluster.run_tag import new_run_id
from megarl.config import Config
from megarl.config_file import dump
from megarl.sample import Sample

if TYPE_CHECKING:
    from megarl.checkpoint.resume import Resume

PACKAGES = ("megarl", "torch", "megatron-core", "sglang", "ray", "transformers", "transformer-engine", "numpy")


class RunDirectory:
    """Owns the files of one run; each line is on disk when its call returns."""

    def __init__(self, config: Config, command: list[str], device: str, resume: "Resume | None" = None):
        """What there is of later steps than those that `resume` goes on from is set aside."""
        self.config = config
        self.path = config.run_path
        self.run_id = new_run_id(config.name)
        for folder in ("logs", "checkpoints"):
            (self.path / folder).mkdir(parents=True, exist_ok=True)
        step = resume.step if resume else None
        for name in ("metrics.jsonl", "samples.jsonl", "failed_rewards.jsonl"):
            keep_steps(self.path / name, step)
        set_aside_newer(self.path, step or 0)
        remove_leftovers(self.path / "checkpoints")
        (self.path / "config.yaml").write_text(dump(config.model_dump(mode="json")), encoding="utf-8")
        about = {"run_id": self.run_id, "resumed_from": str(resume.folder) if resume else None}
        about |= environment(command, config.seed, device) | {"earlier": earlier_starts(self.path / "env.json")}
        (self.path / "env.json").write_text(json.dumps(about, indent=2) + "\n")
        self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)
        self._samples = open(self.path / "samples.jsonl", "a", buffering=1)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    def log_metrics(self, metrics: dict) -> None:
        self._metrics.write(json.dumps(metrics, allow_nan=False) + "\n")

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
            self._samples.write(json.dumps(row, ensure_ascii=False) + "\n")

    def log_failed(self, step: int, failed: list[tuple[Sample, str]]) -> None:
        """Samples that were dropped as their reward failed, into a file that is there only where there are some."""
        if not failed:
            return
        with open(self.path / "failed_rewards.jsonl", "a") as file:
            for sample, reason in failed:
                row = {"step": step, "group": sample.group_id, "source": sample.prompt.metadata.get("source")}
                row |= {"response": sample.response_text, "answer": sample.prompt.answer, "error": reason}
                file.write(json.dumps(row) + "\n")

    def dump_batch(self, name: str, samples: list[Sample]) -> Path:
        """Samples with all their tensors, for `torch.load(file, weights_only=False)`."""
        file = self.path / "skipped" / f"{name}.pt"
        file.parent.mkdir(exist_ok=True)
        torch.save(samples, file)
        return file

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exception) -> None:
        self._metrics.close()
        self._samples.close()


def keep_steps(file: Path, step: int | None) -> None:
    """Move a file's lines of steps after this one, and a last line that is cut off, to NAME.superseded.jsonl; None: all.

    Lines without a step, of a warm start, stay.
    """
    if not file.exists():
        return
    kept, moved = [], []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        stays = line.endswith("\n") and step is not None and json.loads(line).get("step", 0) <= step
        (kept if stays else moved).append(line)
    if moved:
        with open(file.with_suffix(".superseded.jsonl"), "a", encoding="utf-8") as superseded:
            superseded.writelines(line.rstrip("\n") + "\n" for line in moved)
        whole = file.with_name(file.name + ".kept")
        whole.write_text("".join(kept), encoding="utf-8")
        os.replace(whole, file)


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
