"""A checkpoint on disk: what it holds, whether it is whole, and which one is the newest.

step_000010/          written as step_000010.partial, renamed when it is whole
    actor/, critic/   a role folder each: Megatron's distributed checkpoint, megarl.json and hf/
    state.json        of the loop: step, place in the data, controllers, guards, best validation
    kept.jsonl        groups of samples that later steps will use
    config.yaml       of the run, resolved
    manifest.json     size and SHA-256 of every other file: written last
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from megarl.errors import ConfigError

MANIFEST, STATE, KEPT, CONFIG = "manifest.json", "state.json", "kept.jsonl", "config.yaml"
HF_FOLDER = "hf"  # of a role folder: the small files of its model
ROLE_FILE = "megarl.json"  # a folder that has it is a role's
BEST = "best"  # a link to the checkpoint of the best validation
PARTIAL, REMOVED, SUPERSEDED = ".partial", ".removed", ".superseded"
NAME = re.compile(r"step_(\d{6,})")
CURRENT_DIRECTORY, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


class FileRecord(TypedDict):
    size: int  # bytes
    sha256: str


def name_of(step: int) -> str:
    return f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Of a checkpoint's folder, published or not."""
    return int(NAME.match(folder.name).group(1))


def record(file: Path) -> FileRecord:
    """What the manifest says of a file; it is on the disk, and not only in memory, when this returns."""
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())
    return {"size": file.stat().st_size, "sha256": sha256(file)}


def sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def record_all(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Of files by their names in `folder`."""
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: record(folder / name), names)))


def file_names(folder: Path) -> list[str]:
    """Of all files below `folder`, as the manifest has them."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def publish(partial: Path, records: dict[str, FileRecord]) -> Path:
    """Give a folder that is whole its name; a checkpoint of that name is replaced. `records`: of files whose digests
    are known already."""
    new = record_all(partial, (name for name in file_names(partial) if name not in records and name != MANIFEST))
    (partial / MANIFEST).write_text(json.dumps({"files": records | new}, indent=1) + "\n")
    record(partial / MANIFEST)
    for directory in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync_directory(directory)
    folder = partial.with_name(partial.name.removesuffix(PARTIAL))
    old = put_in_place(partial, folder)
    sync_directory(folder.parent)
    if old:
        remove(old)
    return folder


def put_in_place(partial: Path, folder: Path) -> Path | None:
    """Rename; what `folder` was before is returned under its new name."""
    if not folder.exists():
        os.replace(partial, folder)
        return None
    names = (CURRENT_DIRECTORY, os.fsencode(partial), CURRENT_DIRECTORY, os.fsencode(folder))
    if ctypes.CDLL(None).renameat2(*names, EXCHANGE) == 0:
        return partial
    old = take_name(folder)  # a file system that cannot exchange two names, as NFS
    os.replace(partial, folder)
    return old


def sync_directory(folder: Path) -> None:
    """Have the names in it on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Take a checkpoint away; what a kill in between leaves does not have a checkpoint's name."""
    if folder.exists():
        shutil.rmtree(take_name(folder))


def take_name(folder: Path) -> Path:
    """What it is called afterwards."""
    removed = folder.with_name(folder.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(folder, removed)
    return removed


def remove_leftovers(checkpoints: Path) -> None:
    """Of saves and removals that were broken off."""
    for suffix in (PARTIAL, REMOVED):
        for folder in checkpoints.glob(f"*{suffix}"):
            shutil.rmtree(folder)


def problems(folder: Path, digests: bool = True) -> list[str]:
    """Why a checkpoint is not whole, each file that is missing or wrong; [] where it is. Without `digests` files are
    not read."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        written = {name: (about["size"], about["sha256"]) for name, about in files.items()}
    except FileNotFoundError:
        return [f"no {MANIFEST}"]
    except OSError as error:
        return [f"{MANIFEST} cannot be read: {error.strerror}"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} is broken: {error}"]
    if not written:
        return [f"{MANIFEST} is broken: it lists no file"]

    def problem(name: str, had: tuple[int, str]) -> str | None:
        file = folder / name
        try:
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != had[0]:
                return f"{name} has {size} bytes and had {had[0]}"
            if digests and sha256(file) != had[1]:
                return f"{name} has changed: its SHA-256 is not that of the manifest"
        except OSError as error:  # a disk that fails
            return f"{name} cannot be read: {error.strerror}"
        return None

    with ThreadPoolExecutor() as pool:
        return [text for text in pool.map(problem, written.keys(), written.values()) if text]


def verify(folder: Path) -> None:
    """ConfigError naming every file of a checkpoint that is missing or not as it was written."""
    if found := problems(folder):
        raise ConfigError(f"{folder} is not a complete checkpoint: {'; '.join(found)}")


def checkpoints_of(run_path: Path) -> list[Path]:
    """The published checkpoints of a run directory, the newest first, whether whole or not."""
    folders = [folder for folder in (run_path / "checkpoints").glob("step_*") if NAME.fullmatch(folder.name)]
    return sorted(folders, key=step_of, reverse=True)


def newest_complete(run_path: Path, digests: bool = True) -> tuple[Path | None, dict[str, str]]:
    """(The newest complete checkpoint, name of what is newer and was passed over -> why)."""
    partial = [folder for folder in (run_path / "checkpoints").glob(f"*{PARTIAL}") if NAME.match(folder.name)]
    partial.sort(key=step_of, reverse=True)
    passed_over = {}
    for folder in checkpoints_of(run_path):
        if not (found := problems(folder, digests)):
            newer = [other for other in partial if step_of(other) > step_of(folder)]
            return folder, {other.name: "was not finished" for other in newer} | passed_over
        passed_over[folder.name] = "; ".join(found)
    return None, {other.name: "was not finished" for other in partial} | passed_over


def last_good(run_path: Path) -> str:
    """For the message of a failure: where the run can go on from."""
    folder, _ = newest_complete(run_path, digests=False)
    return f"the last good checkpoint is {folder}, untouched" if folder else "there is no earlier checkpoint"


def set_aside_newer(run_path: Path, step: int) -> list[Path]:
    """Rename checkpoints of later steps than a run goes on from: they are of another course of it."""
    moved = []
    for folder in checkpoints_of(run_path):
        if step_of(folder) > step:
            number = 1
            while (target := folder.with_name(f"{folder.name}{SUPERSEDED}_{number}")).exists():
                number += 1
            os.replace(folder, target)
            moved.append(target)
    return moved


def role_folder(path: str | Path, role: str = "actor") -> Path:
    """The role folder of: itself, a checkpoint, or a run directory, whose newest complete checkpoint it is.

    Raises ConfigError where there is none. Digests are not looked at: see `verify`.
    """
    path = Path(path)
    if (path / ROLE_FILE).is_file():
        return path
    checkpoint = path
    if (path / "checkpoints").is_dir():
        checkpoint, passed_over = newest_complete(path, digests=False)
        if checkpoint is None:
            why = "".join(f"; {name}: {reason}" for name, reason in passed_over.items())
            raise ConfigError(f"{path} has no complete checkpoint{why}")
    if checkpoint.name.endswith((PARTIAL, REMOVED)):
        raise ConfigError(f"{path} is no checkpoint but what is left of one that was being written or removed")
    if (checkpoint / role / ROLE_FILE).is_file():
        return checkpoint / role
    if roles := sorted(file.parent.name for file in checkpoint.glob(f"*/{ROLE_FILE}")):
        raise ConfigError(f"{checkpoint} has no {role}, only {', '.join(roles)}")
    raise ConfigError(f"{path} is neither a checkpoint nor a run directory with one in checkpoints/")
