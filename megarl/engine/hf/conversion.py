"""What both directions of a conversion share: a folder that is whole or not there, and what is written down of it."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.checkpoint.folder import PARTIAL, FileRecord
from megarl.errors import ConfigError, RunError
from megarl.monitor.run_directory import version

FILE = "conversion.json"
PACKAGES = ("megarl", "torch", "megatron-core", "transformers", "safetensors")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into. The caller gives it the name `out` once it is whole; if it does not, it is removed."""
    if os.path.lexists(out):
        raise ConfigError(f"{out} exists already; a conversion never overwrites")
    partial = out.with_name(out.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
    except OSError as error:
        raise RunError(f"{out} was not written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise RunError(f"{num_bytes / 1e9:.1f} GB of weights, and {folder.parent} has room for {free / 1e9:.1f} GB")


def describe(folder: Path, source: Path, dtype: str, weights: dict[str, FileRecord], step: int | None = None) -> str:
    """Write conversion.json, with the records of the files of weights; returns a line with one digest of them all: that
    of what `sha256sum` says of them in the order of their names."""
    digests = "".join(f"{weights[name]['sha256']}  {name}\n" for name in sorted(weights))
    digest = hashlib.sha256(digests.encode()).hexdigest()
    about = {"source": str(source.resolve()), "step": step, "dtype": dtype, "sha256": digest, "weights": weights}
    about["versions"] = {name: version(name) for name in PACKAGES}
    (folder / FILE).write_text(json.dumps(about, indent=1) + "\n")
    return f"SHA-256 of all weights: {digest}"
