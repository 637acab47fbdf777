"""What the servers generated in a run, kept in a folder, and training on it again without servers."""

import re
from pathlib import Path

from megarl.checkpoint.resume import Resume
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.errors import ConfigError, RunError
from megarl.sample import Prompt, Sample
from megarl.sample_file import read_samples, write_samples


def round_name(step: int, number: int) -> str:
    """Of what is generated for a step; numbers from 1, more than one with dynamic sampling."""
    return f"step_{step:06d}_round_{number}"


def validation_name(step: int) -> str:
    return f"validation_{step:06d}"


class Recording:
    """A folder with a file for each call that generated samples; they have no rewards yet."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def save(self, name: str, samples: list[Sample]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_samples(self.file(name), samples)
        except OSError as error:
            raise RunError(f"rollout.save: {self.file(name)} cannot be written: {error.strerror}") from error

    def forget_after(self, step: int) -> None:
        """What was generated for later steps, before a run that goes on from this one generates them anew."""
        for file in self.folder.glob("*.jsonl"):
            if (found := re.match(r"(?:step|validation)_(\d+)", file.name)) and int(found.group(1)) > step:
                file.unlink()

    def load(self, name: str, prompts: list[Prompt], group_size: int) -> list[Sample]:
        """What was generated for these prompts. RunError where it was for others, or is not there."""
        file = self.file(name)
        if not file.is_file():
            raise RunError(f"rollout.replay: {file} does not exist")
        samples = read_samples(file, lambda source, i: prompts[min(i // group_size, len(prompts) - 1)])
        if len(samples) != len(prompts) * group_size:
            wanted = f"{len(prompts)} prompts x {group_size}"
            raise RunError(f"rollout.replay: {file} has {len(samples)} samples, wanted {wanted}")
        return samples


def check_recordings(config: Config, resume: Resume | None) -> None:
    """ConfigError where the folder to write into has recordings of another run, or the one to read from lacks some."""
    rollout, trainer = config.rollout, config.trainer
    are_ours = resume is not None and resume.in_place
    if rollout.save and not are_ours and (old := sorted(Path(rollout.save).glob("*.jsonl"))):
        raise ConfigError(f"rollout.save: {rollout.save} holds {len(old)} recordings already, among them {old[0].name}")
    if rollout.replay is None:
        return
    recording, done = Recording(rollout.replay), resume.step if resume else 0
    steps = range(done + 1, trainer.steps + 1)
    if trainer.early_stop:  # it may have ended the run that was recorded
        last = max((step for step in steps if recording.file(round_name(step, 1)).is_file()), default=trainer.steps)
        steps = range(done + 1, last + 1)
    names = [round_name(step, 1) for step in steps]
    if config.data.validation:
        due = [step for step in steps if trainer.is_due(step, trainer.evaluate_every)]
        owed = [done] if resume is None or not resume.state["is_validated"] else []
        names += [validation_name(step) for step in (*owed, *due)]
    if missing := [name for name in names if not recording.file(name).is_file()]:
        some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigError(f"rollout.replay: {rollout.replay} lacks {some} (.jsonl)")


class Replay:
    """Stands where the servers do (`megarl.rollout.fleet.Fleet`), and says again what they said."""

    restarts = 0

    def __init__(self, recording: Recording):
        self.recording = recording
        self.version = -1
        self.watched: list[RoleGroup] = []

    def __enter__(self) -> "Replay":
        return self

    def __exit__(self, *exception) -> None:
        pass

    def connect(self) -> None:
        pass

    def attach(self, actor: RoleGroup) -> None:
        pass

    def generate(
        self,
        name: str,
        prompts: list[Prompt],
        group_size: int,
        tokenizer,
        temperature=None,
        seeds=None,
        max_new_tokens=None,
    ) -> list[Sample]:
        return self.recording.load(name, prompts, group_size)

    def push(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    def make_room(self) -> None:
        pass

    def stop(self) -> None:
        pass
