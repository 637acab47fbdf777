"""Saving the state of a run: begun when a step has changed the weights, published when all of it is on disk."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint import folder as folders
from megarl.checkpoint.best import metric_of, num_best
from megarl.checkpoint.folder import FileRecord
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.errors import RunError
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Sample
from megarl.sample_file import write_samples


@dataclass(frozen=True)
class LoopState:
    """Of the loop after a step; with the state of the roles it is all that the next step depends on."""

    step: int
    values: dict  # for JSON
    kept: list[list[Sample]]  # groups that later steps will use
    score: float | None = None  # of the validation after the step, if there was one


@dataclass
class Save:
    """One that is going on."""

    step: int
    folder: Path
    is_committed: bool = False
    has_failed: bool = False


class Saver:
    """`begin` copies the roles' state to host memory, and their ranks write it while training goes on; `commit` adds
    the state of the loop; `poll`, called now and then, or `settle`, which waits, publishes."""

    def __init__(self, config: Config, run: RunDirectory, tokenizer, console: Console):
        self.config = config
        self.run = run
        self.tokenizer = tokenizer
        self.console = console
        self.roles: dict[str, RoleGroup] = {}
        self.save: Save | None = None
        self.published: int | None = None  # step of the newest
        self.reference_was_saved = False  # in the checkpoint that the run goes on from

    def use(self, roles: dict[str, RoleGroup]) -> None:
        """Those that are trained; checkpoint.roles says which of them are saved."""
        switches = self.config.checkpoint.roles
        self.roles = {name: role for name, role in roles.items() if getattr(switches, name)}

    @property
    def is_open(self) -> bool:
        """Whether a save was begun that waits for the state of the loop."""
        return self.save is not None and not self.save.is_committed

    def has(self, step: int) -> bool:
        """Whether the roles' state after this step is saved, or about to be."""
        return self.published == step or (self.save is not None and self.save.step == step)

    def begin(self, step: int, hold: Callable[[RoleGroup], None]) -> None:
        """All roles are as they are after this step; `hold` has one hold all that it has on its GPUs. Returns when they
        may change; RunError naming who failed."""
        self.settle()
        partial = self.run.checkpoint(folders.name_of(step) + folders.PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        self.save = Save(step, partial)
        with self._telling_of_failure():
            num_bytes, free = 0, shutil.disk_usage(partial.parent).free  # before they write
            for name, role in self.roles.items():
                (partial / name).mkdir(parents=True)
                hold(role)
                reference = name == "actor" and self._keeps_reference
                num_bytes += role.start_save(str((partial / name).resolve()), reference)
            if num_bytes > free:
                raise RunError(f"{num_bytes / 1e9:.3g} GB are to be written, and {free / 1e9:.3g} GB are free")

    @property
    def _keeps_reference(self) -> bool:
        """Whether the reference is another than the model folder's."""
        reference = self.config.roles.reference
        is_supervised = self.config.algorithm.is_supervised
        moved = bool(self.config.warm_start.data) or reference.refresh_every > 0 or self.reference_was_saved
        return reference.enabled and moved and not is_supervised

    def commit(self, state: LoopState) -> None:
        """What the loop has to say of the step that was begun."""
        save = self.save
        assert save is not None and save.step == state.step, f"step {state.step} was not begun"
        with self._telling_of_failure():
            about = {"step": state.step, "score": state.score, **state.values}
            (save.folder / folders.STATE).write_text(json.dumps(about) + "\n")
            write_samples(save.folder / folders.KEPT, sum(state.kept, []))
            shutil.copy2(self.run.path / folders.CONFIG, save.folder)
            save.is_committed = True
            if not self.config.checkpoint.asynchronous:
                self._publish()

    def poll(self) -> None:
        """Publish, if all is written by now."""
        if self.save is not None and self.save.is_committed:
            with self._telling_of_failure():
                if all(role.has_written() for role in self.roles.values()):
                    self._publish()

    def settle(self) -> None:
        """Wait for what was committed; what was only begun is given up."""
        if self.save is None or self.save.has_failed:
            return
        with self._telling_of_failure():
            if self.save.is_committed:
                self._publish()
            else:
                for role in self.roles.values():
                    role.finish_save()
                shutil.rmtree(self.save.folder)
                self.save = None

    def clear(self) -> None:
        """After the run, when no rank writes any more: take away what was not finished."""
        if self.save is not None:
            shutil.rmtree(self.save.folder, ignore_errors=True)

    def _publish(self) -> None:
        save = self.save
        records: dict[str, FileRecord] = {}
        for name, role in self.roles.items():
            records |= {f"{name}/{file}": about for file, about in role.finish_save().items()}
        if missing := [name for name in records if not (save.folder / name).is_file()]:
            raise RunError(f"{missing[0]} was written on another node: run_directory must be on a disk that all share")
        if self.config.data.chat_template is not None and "actor" in self.roles:  # where it is not the model's own
            template = "actor/hf/chat_template.jinja"
            (save.folder / template).write_text(self.tokenizer.chat_template, encoding="utf-8")
            records.pop(template, None)
        published = folders.publish(save.folder, records)
        self.save, self.published = None, save.step
        self.console.line(f"checkpoint {published}")
        try:
            retain(self.config, self.run.path, self.console)
        except OSError as error:
            self.console.line(f"warning: not all is kept and removed as `checkpoint` in the config says: {error}")

    @contextmanager
    def _telling_of_failure(self):
        """An error says which checkpoint is not there, and which one is."""
        save = self.save
        try:
            yield
        except (OSError, RunError) as error:
            save.has_failed = True
            raise RunError(f"step {save.step} was not saved: {error}; {folders.last_good(self.run.path)}") from error


def retain(config: Config, run_path: Path, console: Console) -> None:
    """Point to the best checkpoint, and remove those that no key of the config keeps."""
    settings = config.checkpoint
    found = folders.checkpoints_of(run_path)
    best = best_of(config, found, console)
    point_to_best(run_path, best[0] if best else None)
    if settings.keep_last is None:
        return
    kept = {*found[: settings.keep_last], *best}
    if settings.keep_every:
        kept |= {folder for folder in found if folders.step_of(folder) % settings.keep_every == 0}
    for folder in found:
        if folder not in kept:
            folders.remove(folder)


def best_of(config: Config, found: list[Path], console: Console) -> list[Path]:
    """The checkpoints of the best validations, the best first; of equal ones the older."""
    metric, mode = metric_of(config)
    scored = []
    for folder in found:
        try:
            state = json.loads((folder / folders.STATE).read_text())
            score = state["score"] if state["best"]["metric"] == metric else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            console.line(f"warning: how good {folder} is cannot be read from {folders.STATE}: {why}")
            continue
        if score is not None and not math.isnan(score):
            scored.append((-score if mode == "max" else score, folders.step_of(folder), folder))
    return [folder for _, _, folder in sorted(scored)[: num_best(config)]]


def point_to_best(run_path: Path, folder: Path | None) -> None:
    link = run_path / "checkpoints" / folders.BEST
    if folder is None:
        link.unlink(missing_ok=True)
        return
    new = link.with_name(f".{folders.BEST}")
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)
    new.replace(link)
