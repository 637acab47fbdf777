"""What `--model` names: a Hugging Face folder, which is served as it is, or a checkpoint, which is exported for it."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint.folder import BEST, HF_FOLDER, MANIFEST, ROLE_FILE, problems, role_folder
from megarl.errors import ConfigError

NAME = r"\w[\w.-]*"  # of files too
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path  # with config.json and tokenizer
    role_folder: Path | None = None  # of a checkpoint, whose weights an export has to bring into HF's form

    @property
    def place(self) -> str:
        return str(self.role_folder or self.folder)

    def dtype(self) -> str:
        """Of its weights. Raises ConfigError where it is none that servers are started with."""
        file, keys = self.folder / "config.json", ("dtype", "torch_dtype")
        if self.role_folder:
            file, keys = self.role_folder / ROLE_FILE, ("dtype",)
        try:
            about = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read: {error}") from error
        found = next((about[key] for key in keys if about.get(key)), None)
        if found not in DTYPES:
            raise ConfigError(f"{file}: dtype {found}, and servers take {' or '.join(DTYPES)}: give --dtype")
        return found


def parse(given: str) -> Model:
    """Of NAME=PATH or PATH, which is named after its folder, a checkpoint after its run too.

    Raises ConfigError where there is no model.
    """
    name, equals, path = given.partition("=")
    if not equals or not re.fullmatch(NAME, name) or Path(given).exists():
        name, path = None, given
    model = find(Path(path))
    name = name or name_of(model)
    if not re.fullmatch(NAME, name):
        text = f"{name!r} cannot name it, as files are named after it: letters, digits, '_', '-' and '.'"
        raise ConfigError(f"{text}; NAME=PATH gives it another name")
    return Model(name, model.folder, model.role_folder)


def find(path: Path) -> Model:
    """The model, still without a name, of a Hugging Face folder, a run directory, a checkpoint or an actor's folder in
    one. Of a run it is the best checkpoint where one is kept, else the newest complete one."""
    if not path.is_dir():
        raise ConfigError(f"no such folder: {path}")
    if (path / "config.json").is_file():
        return Model("", path)
    best = path / "checkpoints" / BEST
    role = role_folder(best if best.is_dir() else path)
    if (role.parent / MANIFEST).is_file() and (found := problems(role.parent, digests=False)):
        raise ConfigError(f"{role.parent} is not a complete checkpoint: {'; '.join(found)}")
    head = json.loads((role / ROLE_FILE).read_text())["head"]
    if head != "lm":
        raise ConfigError(f"{role} has a {head} head: it scores, and writes no responses")
    return Model("", role / HF_FOLDER, role)


def name_of(model: Model) -> str:
    if model.role_folder is None:
        return model.folder.resolve().name
    checkpoint = model.role_folder.resolve().parent  # which `best` is a link to
    is_of_run = checkpoint.parent.name == "checkpoints"
    return f"{checkpoint.parents[1].name}-{checkpoint.name}" if is_of_run else checkpoint.name


@contextmanager
def served_folder(model: Model, scratch: Path) -> Iterator[Path]:
    """Within: the folder that a server loads; an export lies in `scratch` until then.

    Raises ConfigError where the checkpoint is not whole, RunError where there is no room for an export.
    """
    if model.role_folder is None:
        yield model.folder
        return
    from megarl.engine.hf.export import export_hf

    with tempfile.TemporaryDirectory(prefix=f"export-{model.name}-", dir=scratch) as folder:
        out = Path(folder) / "model"
        export_hf(model.role_folder, out)
        yield out
