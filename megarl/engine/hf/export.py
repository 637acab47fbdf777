"""A run or a Megatron checkpoint -> a Hugging Face folder that transformers and SGLang load."""

import json
import os
import shutil
from pathlib import Path

from huggingface_hub import save_torch_state_dict

from megarl.config import ModelConfig, RoleConfig
from megarl.engine import checkpoint, parallel
from megarl.engine.engine import Engine
from megarl.errors import ConfigError
from megarl.rollout.server import free_port


def export_hf(run_or_checkpoint: str | Path, out: str | Path, max_shard_size: str = "5GB") -> Path:
    """Write `out` from a checkpoint folder, or from the last checkpoint of a run directory; returns the checkpoint used.

    Full tensors under HF names, in files of at most `max_shard_size`, in the dtype of training, vocabulary padding removed,
    ties kept. In this process, on CPU. Raises ConfigError where there is no checkpoint or `out` exists.
    """
    source, out = find_checkpoint(Path(run_or_checkpoint)), Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already; an export never overwrites")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.copy_small_files(source / checkpoint.HF_FOLDER, partial)
    dtype = json.loads((source / "megarl.json").read_text())["dtype"]
    set_dtype(partial / "config.json", dtype)
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), RoleConfig(), seed=0)
    try:
        model = ModelConfig(path=str(source / checkpoint.HF_FOLDER), dtype=dtype, transformer_impl="local")
        engine = Engine(model, RoleConfig(), trainable=False, load_weights=False)
        checkpoint.load(engine, source)
        tensors = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
        save_torch_state_dict(tensors, partial, max_shard_size=max_shard_size)
    finally:
        parallel.shutdown()
    os.replace(partial, out)
    return source


def set_dtype(config_file: Path, dtype: str) -> None:
    """transformers loads weights in the dtype that the config names: a narrower one would round them."""
    config = json.loads(config_file.read_text())
    config.pop("torch_dtype", None)  # the key of older transformers
    config_file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a checkpoint, else the last one of the run directory `path`."""
    if (path / "megarl.json").is_file():
        return path
    found = sorted(folder for folder in path.glob("checkpoints/step_*") if (folder / "megarl.json").is_file())
    if not found:
        raise ConfigError(f"{path} is neither a checkpoint nor a run directory with one in checkpoints/")
    return found[-1]
