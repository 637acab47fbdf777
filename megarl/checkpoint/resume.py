"""From which checkpoint a run goes on, and whether it can."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint import config_changes
from megarl.checkpoint import folder as folders
from megarl.checkpoint.best import BestValidation
from megarl.config import Config
from megarl.config_checks import refuse_used_run
from megarl.data.stream import PromptStream
from megarl.errors import ConfigError, RunError
from megarl.sample import Prompt, Sample
from megarl.sample_file import read_samples


@dataclass(frozen=True)
class Resume:
    """A checkpoint that a run goes on from; `in_place`: one of this run directory. `may_change`: the data may be others
    too, and then begin anew."""

    folder: Path
    in_place: bool
    may_change: bool
    state: dict

    @property
    def step(self) -> int:
        """The last one that was done."""
        return self.state["step"]

    def has_role(self, name: str) -> bool:
        return (self.folder / name / folders.ROLE_FILE).is_file()

    def role(self, name: str) -> str:
        """Its role folder, for processes with another working directory."""
        return str((self.folder / name).resolve())

    def has_reference(self) -> bool:
        return "reference" in json.loads((self.folder / "actor" / folders.ROLE_FILE).read_text())

    def set_place(self, stream: PromptStream, print_line: Callable[[str], None]) -> None:
        """Let the stream go on from where it was. ConfigError where its rows, seed or weights are others."""
        try:
            stream.load_state_dict(self.state["data"])
        except ConfigError as error:
            if not self.may_change:
                raise ConfigError(f"{error}; --allow-config-change begins with the new ones") from error
            print_line(f"megarl: changed: {error}: the data begin anew, and groups kept for later steps are dropped")

    def kept(self, stream: PromptStream, prompts: list[Prompt], print_line: Callable[[str], None]) -> list[Sample]:
        """Samples of groups that are still to be used, unless the data have changed."""
        if stream.state_dict() != self.state["data"]:
            return []
        by_source = {prompt.metadata["source"]: prompt for prompt in prompts}
        try:
            return read_samples(self.folder / folders.KEPT, lambda source, _: by_source.get(source), same_tokens=False)
        except RunError as error:  # the same rows in another file, or in other lines of it
            if not self.may_change:
                raise RunError(f"{error}; --allow-config-change goes on without groups kept for later steps") from error
            print_line(f"megarl: changed: {error}: groups kept for later steps are dropped")
            return []

    def why_done(self, config: Config) -> str | None:
        """Where there is nothing left to do."""
        if not self.state["is_validated"]:
            return None
        if self.step >= config.trainer.steps:
            return f"all {config.trainer.steps} steps are done (trainer.steps)"
        best = BestValidation.of(config)
        best.load_state_dict(self.state["best"])
        return best.why_stop()


def find(config: Config, mode: str, allow_config_change: bool, print_line: Callable[[str], None]) -> Resume | None:
    """The checkpoint for `--resume auto|PATH`; None: from the beginning. Tells which one it is, and why newer ones were
    passed over.

    Raises ConfigError: PATH is no complete checkpoint; auto, and there are only incomplete ones; PATH of another run,
    but the run directory is used; a config that would train otherwise than the saved one, or a trained role that the
    checkpoint does not have, unless that is allowed; no actor.
    """
    if mode == "auto":
        folder = _newest(config, print_line)
        if folder is None:
            print_line(f"megarl: --resume auto: {config.run_path} has no checkpoint: from the beginning")
            return None
    else:
        folder = _given(Path(mode))
    if config.debug.generate_only:
        raise ConfigError(f"--resume: debug.generate_only trains nothing that could go on from {folder}; valid: never")
    if not (folder / folders.STATE).is_file() or not (folder / folders.CONFIG).is_file():
        text = f"no {folders.STATE} and {folders.CONFIG}: it is a model, and not the state of a run"
        raise ConfigError(f"--resume: {folder} has {text}")
    is_named = folders.NAME.fullmatch(folder.name) is not None  # and not set aside
    in_place = is_named and folder.resolve().parent == (config.run_path / "checkpoints").resolve()
    if not in_place:
        refuse_used_run(config)
    found = Resume(folder, in_place, allow_config_change, json.loads((folder / folders.STATE).read_text()))
    differences = config_changes.changes(config, config_changes.read(folder / folders.CONFIG))
    missing = [name for name in config.roles.trained if not found.has_role(name)]
    if "actor" in missing:
        raise ConfigError(f"--resume: {folder} has no actor (checkpoint.roles.actor was false): nothing to go on from")
    differences += [f"checkpoint.roles: the {name} was not saved, and would start anew" for name in missing]
    if differences and not allow_config_change:
        lines = "\n  ".join(differences)
        text = f"--resume: {folder} was trained with another config; --allow-config-change goes on with this one:"
        raise ConfigError(f"{text}\n  {lines}")
    for line in differences:
        print_line(f"megarl: changed: {line}")
    print_line(f"megarl: going on from {folder}, after step {found.step}")
    return found


def _newest(config: Config, print_line: Callable[[str], None]) -> Path | None:
    folder, passed_over = folders.newest_complete(config.run_path)
    for name, why in passed_over.items():
        print_line(f"megarl: --resume auto: passed over {config.run_path}/checkpoints/{name}: {why}")
    if folder is None and passed_over:
        reasons = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
        text = f"--resume auto: {config.run_path} has no complete checkpoint, only incomplete ones ({reasons}); "
        raise ConfigError(text + "remove them to begin again")
    return folder


def _given(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"--resume: {path} does not exist; valid: auto, never, a checkpoint or a run directory")
    if (path / "checkpoints").is_dir():
        folder, passed_over = folders.newest_complete(path)
        if folder is None:
            reasons = "".join(f"; {name}: {why}" for name, why in passed_over.items())
            raise ConfigError(f"--resume: {path} has no complete checkpoint{reasons}")
        return folder
    path = path.resolve() if path.is_symlink() else path  # best
    if path.name.endswith((folders.PARTIAL, folders.REMOVED)):
        raise ConfigError(f"--resume: {path} was not finished, or was being removed")
    if not folders.NAME.fullmatch(path.name) and not (path / folders.MANIFEST).is_file():
        raise ConfigError(f"--resume: {path} is neither a checkpoint nor a run directory")
    folders.verify(path)
    return path
