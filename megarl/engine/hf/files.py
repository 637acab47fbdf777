"""The files of a Hugging Face folder: which belong to a model besides its weights, and where its tensors are."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import ConfigError

SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")  # all but weights
NAMED_TEMPLATES = "additional_chat_templates"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names


@dataclass(frozen=True)
class TensorInFile:
    file: Path
    shape: torch.Size
    dtype: str  # safetensors' name of it


def copy_small_files(source: Path, target: Path) -> None:
    """Into a folder that is made where it is not there."""
    target.mkdir(exist_ok=True)
    for file in (file for pattern in SMALL_FILES for file in source.glob(pattern)):
        if not file.name.endswith(".index.json"):  # of the old weights' shards
            shutil.copy2(file, target)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, target / NAMED_TEMPLATES)


def tensors_in(folder: Path) -> dict[str, TensorInFile]:
    """HF name -> where it is. Raises ConfigError naming the files that are missing or broken."""
    found, problems = {}, []
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    found[name] = TensorInFile(file, torch.Size(part.get_shape()), part.get_dtype())
        except FileNotFoundError:
            problems.append(f"{file} is missing")
        except SafetensorError as error:
            problems.append(f"{file} is broken: {error}")
    if problems:
        raise ConfigError("; ".join(problems))
    return found


def weight_files(folder: Path) -> list[Path]:
    """As transformers finds them: those that the index names, or the single file; else all, for want of an index."""
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise ConfigError(f"{folder} holds no *.safetensors file")
