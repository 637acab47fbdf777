"""A run or a Megatron checkpoint -> a Hugging Face folder that transformers and SGLang load."""

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from megarl.config import CriticConfig, ModelConfig
from megarl.engine import checkpoint, parallel
from megarl.engine.engine import Engine
from megarl.errors import ConfigError
from megarl.rollout.server import free_port


def export_hf(run_or_checkpoint: str | Path, out: str | Path, max_shard_size: str = "5GB") -> str:
    """Write `out` from a checkpoint folder, or from the last checkpoint of a run directory; returns a line about it.

    Full tensors under HF names, in files of at most `max_shard_size`, in the dtype of training, vocabulary padding
    removed, ties kept. A value head makes it a sequence classifier with one label. In this process, on CPU. Raises
    ConfigError where there is no checkpoint or `out` exists.
    """
    source, out = find_checkpoint(Path(run_or_checkpoint)), Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists already; an export never overwrites")
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.copy_small_files(source / checkpoint.HF_FOLDER, partial)
    about = json.loads((source / "megarl.json").read_text())
    head = about.get("head", "lm")  # a checkpoint that names none is of a language model
    config = json.loads((partial / "config.json").read_text())
    config = with_dtype(config, about["dtype"]) | (classifier_keys(config) if head == "value" else {})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = full_tensors(source, about["dtype"], head, about.get("value_head_bias", False))
    written = f"wrote {out} from {source}"
    if head == "value":
        # SGLang's classes for Qwen have a bias, which they leave at random values where the folder has none.
        bias = tensors.setdefault("score.bias", torch.zeros(1, dtype=tensors["score.weight"].dtype))
        if bias:
            written += f"; transformers leaves out its score.bias, so scores there are lower by {float(bias):g}"
    save_torch_state_dict(tensors, partial, max_shard_size=max_shard_size)
    os.replace(partial, out)
    return written


def full_tensors(source: Path, dtype: str, head: str, value_head_bias: bool) -> dict[str, torch.Tensor]:
    """HF name -> the whole tensor."""
    role = CriticConfig(value_head_bias=value_head_bias)
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), role, seed=0)
    try:
        model = ModelConfig(path=str(source / checkpoint.HF_FOLDER), dtype=dtype, transformer_impl="local")
        engine = Engine(model, role, head, trainable=False, load_weights=False)
        checkpoint.load(engine, source)
        return {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    finally:
        parallel.shutdown()


def with_dtype(config: dict, dtype: str) -> dict:
    """transformers loads weights in the dtype that the config names: a narrower one would round them."""
    return {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}  # the older key


def classifier_keys(config: dict) -> dict:
    """What makes transformers and SGLang build a sequence classifier with one label.

    transformers scores the last token that is not padding. Where the end-of-turn token pads, that would be the one
    before it: without a padding token it scores single sequences rightly and refuses batches.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config["model_type"]]
    keys = {"architectures": [architecture], "id2label": {"0": "score"}, "label2id": {"score": 0}}
    eos, pad = config.get("eos_token_id"), config.get("pad_token_id")
    if pad is not None and pad in (eos if isinstance(eos, list) else [eos]):
        keys["pad_token_id"] = None
    return keys


def find_checkpoint(path: Path) -> Path:
    """`path` itself where it is a checkpoint, else the last one of the run directory `path`."""
    if (path / "megarl.json").is_file():
        return path
    found = sorted(file.parent for file in path.glob("checkpoints/*/megarl.json"))
    steps = [folder for folder in found if folder.name.startswith("step_")]
    if steps:
        return steps[-1]
    if found:
        names = ", ".join(folder.name for folder in found)
        raise ConfigError(f"{path} has no checkpoint of a finished step, only {names}: give {found[-1]} to export it")
    raise ConfigError(f"{path} is neither a checkpoint nor a run directory with one in checkpoints/")
