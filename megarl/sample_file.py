"""Samples as JSON lines: exactly as they were, for another process. A prompt is named by its place in the data."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from megarl.errors import RunError
from megarl.sample import Prompt, Sample, Status

DTYPES = {"token_ids": torch.int64, "loss_mask": torch.bool}  # of the other tensors: float32
NAMES = [field.name for field in dataclasses.fields(Sample) if field.name != "prompt"]


def write_samples(file: Path, samples: Iterable[Sample]) -> None:
    """All of them or, after a kill, no file of this name."""
    partial = file.with_name(file.name + ".partial")
    with open(partial, "w", encoding="utf-8", errors="backslashreplace") as stream:  # a lone surrogate as JSON has it
        stream.writelines(json.dumps(_row(sample), ensure_ascii=False) + "\n" for sample in samples)
    os.replace(partial, file)


def read_samples(file: Path, prompt_at: Callable[[str, int], Prompt | None], same_tokens: bool = True) -> list[Sample]:
    """`prompt_at(source, i)`: the prompt of the i-th sample, which came from `source`; None where there is none.

    Without `same_tokens` a prompt keeps the tokens that it had: a template may put in the day's date.
    Raises RunError naming the line where its prompt is another or has other tokens, or the line is broken.
    """
    samples = []
    with open(file, encoding="utf-8") as stream:
        for i, line in enumerate(stream):
            where = f"{file}:{i + 1}"
            try:
                row = json.loads(line)
                source = row.pop("source")
                fields = {name: _value(name, row[name]) for name in NAMES}
            except (ValueError, KeyError, TypeError) as error:
                raise RunError(f"{where}: not a sample: {type(error).__name__}: {error}") from error
            prompt = prompt_at(source, i)
            if prompt is None or prompt.metadata["source"] != source:
                place = prompt.metadata["source"] if prompt else "nothing"
                raise RunError(f"{where}: its prompt is from {source}, but here comes {place}: data have changed")
            token_ids = row["token_ids"][: row["prompt_length"]]
            if prompt.token_ids != token_ids and same_tokens:
                text = f"the prompt from {source} has other tokens now: data or chat template have changed"
                raise RunError(f"{where}: {text}")
            if prompt.token_ids != token_ids:
                prompt = dataclasses.replace(prompt, token_ids=token_ids)
            samples.append(Sample(prompt=prompt, **fields))
    return samples


def _row(sample: Sample) -> dict:
    row = {"source": sample.prompt.metadata["source"]}
    for name in NAMES:
        value = getattr(sample, name)
        row[name] = value.tolist() if isinstance(value, torch.Tensor) else value
    return row | {"status": sample.status.value}


def _value(name: str, value: Any) -> Any:
    if name == "status":
        return Status(value)
    if name == "policy_version":
        return tuple(value)
    return torch.tensor(value, dtype=DTYPES.get(name, torch.float32)) if isinstance(value, list) else value
