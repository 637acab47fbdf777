"""A Hugging Face folder -> a Megatron checkpoint that engines of any layout load."""

import json
from pathlib import Path

import torch
from safetensors import safe_open

from megarl.checkpoint.folder import HF_FOLDER, ROLE_FILE, file_names, publish, record_all
from megarl.engine.hf.conversion import describe, new_folder, require_room
from megarl.engine.hf.files import DTYPES, TensorInFile, copy_small_files, tensors_in
from megarl.engine.hf.layout import StoredWeight, stored_weights
from megarl.engine.hf.mapping import to_shard
from megarl.engine.hf.shape import ModelShape
from megarl.engine.hf.streaming import write_checkpoint
from megarl.errors import ConfigError

SCORE_BIAS = "score.bias"
NO_WEIGHTS = "rotary_emb.inv_freq"  # end of the names of constants that old folders of Llama hold


def import_hf(
    hf_folder: str | Path, out: str | Path, role: str = "actor", dtype: str | None = None, verify: bool = False
) -> str:
    """Write the checkpoint `out` with one role folder, and no optimizer; returns lines about it.

    In `dtype`, or in that of the folder's tensors, the widest one. A folder with a `score.weight` has a value head,
    with a bias, 0 where the folder has none. One tensor at a time is in memory; `verify` compares with Megatron's model
    at last, for which it holds all of them, in float32. Raises as `export_hf` does.
    """
    hf_folder, out = Path(hf_folder), Path(out)
    with new_folder(out) as partial:
        tensors = tensors_in(hf_folder)
        shape = ModelShape.read(hf_folder)
        head = "value" if "score.weight" in tensors else "lm"
        weights = stored_weights(shape, head)
        require_fitting(hf_folder, shape, weights, tensors)
        dtype = dtype or widest_dtype(tensors)
        require_room(partial, sum(tensor.shape.numel() for tensor in tensors.values()) * getattr(torch, dtype).itemsize)

        def read(weight: StoredWeight) -> torch.Tensor:
            parts = [read_tensor(tensors.get(name), name) for name in weight.parameter.hf_names(shape)]
            return to_shard(shape, weight.parameter, parts, rank=0, size=1)

        folder = partial / role
        folder.mkdir()
        write_checkpoint(folder, weights, read, getattr(torch, dtype))
        copy_small_files(hf_folder, folder / HF_FOLDER)
        about = {"dtype": dtype, "head": head} | ({"value_head_bias": True} if head == "value" else {})
        (folder / ROLE_FILE).write_text(json.dumps(about) + "\n")
        lines = [f"wrote {out} from {hf_folder}, with head {head} as role {role}"]
        if verify:
            from megarl.engine.hf.verify import compare  # Megatron and transformers take seconds to import

            lines.append(compare(folder, hf_folder))
        records = record_all(partial, (name for name in file_names(partial) if name.endswith(".distcp")))
        lines.append(describe(partial, hf_folder, dtype, records))
        publish(partial, records)
    return "\n".join(lines)


def read_tensor(place: TensorInFile | None, name: str) -> torch.Tensor:
    if place is None:
        assert name == SCORE_BIAS, f"{name} is missing"
        return torch.zeros(1)
    with safe_open(place.file, framework="pt") as opened:  # an open file's pages would stay in memory
        return opened.get_tensor(name)


def require_fitting(
    folder: Path, shape: ModelShape, weights: list[StoredWeight], tensors: dict[str, TensorInFile]
) -> None:
    """ConfigError naming every tensor that the folder lacks, that has another shape or that has no place."""
    expected = {name: size for weight in weights for name, size in weight.hf_shapes(shape).items()}
    missing = [name for name in expected if name not in tensors and name != SCORE_BIAS]
    problems = [f"it lacks {name}" for name in missing]
    for name, tensor in tensors.items():
        if name not in expected:
            if not (name.endswith(NO_WEIGHTS) or (name == "lm_head.weight" and shape.tied)):
                problems.append(f"{name} has no place in a {shape.family} model")
        elif tensor.shape != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)} and by config.json should be {list(expected[name])}")
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ConfigError(f"{folder}: {'; '.join(problems[:10])}{more}")


def widest_dtype(tensors: dict[str, TensorInFile]) -> str:
    """That holds all values. Raises ConfigError where one is no float of 16 or 32 bits."""
    found = {tensor.dtype for tensor in tensors.values()}
    if unsupported := sorted(found - DTYPES.keys()):
        raise ConfigError(f"tensors in {', '.join(unsupported)} are not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[found.pop()] if len(found) == 1 else "float32"
