"""A run or a Megatron checkpoint -> a Hugging Face folder that transformers and SGLang load."""

import json
import os
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards

from megarl.checkpoint.config_changes import read as read_config
from megarl.checkpoint.folder import CONFIG, HF_FOLDER, NAME, record_all, role_folder, step_of, sync_directory
from megarl.engine.hf.conversion import describe, new_folder, require_room
from megarl.engine.hf.files import copy_small_files
from megarl.engine.hf.peft import write_peft
from megarl.engine.hf.role_weights import RoleWeights
from megarl.engine.hf.streaming import write_safetensors
from megarl.errors import ConfigError


def export_hf(
    run_or_checkpoint: str | Path,
    out: str | Path,
    role: str = "actor",
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    verify: bool = False,
) -> str:
    """Write `out` from a checkpoint, or from the newest complete one of a run directory; returns lines about it.

    Full tensors under HF names, in files of at most `max_shard_size`, in `dtype` (None: that of training), vocabulary
    padding removed, ties kept. A value head makes it a sequence classifier with one label. One tensor at a time is in
    memory; `verify` compares with Megatron's model at last, for which it holds all of them, in float32.

    Raises ConfigError where there is no whole checkpoint or `out` exists, RunError where a value does not fit into
    `dtype`, the disk is full or the comparison fails. There is no `out` then.
    """
    out = Path(out)
    with new_folder(out) as partial:
        source = role_folder(run_or_checkpoint, role)
        weights = RoleWeights(source)
        dtype = dtype or weights.dtype
        sizes = weights.hf_shapes().items()
        shapes = {name: torch.empty(size, dtype=getattr(torch, dtype), device="meta") for name, size in sizes}
        plan = plan_files(shapes, max_shard_size)
        require_room(partial, sum(tensor.nbytes for tensor in shapes.values()))
        copy_small_files(source / HF_FOLDER, partial)
        write_config(partial / "config.json", dtype, weights.head)
        write_safetensors(partial, weights.hf_tensors(), shapes, plan)
        lines = [f"wrote {out} from {source}"]
        if weights.head == "value" and (bias := weights.value_head_bias()):
            lines[0] += f"; transformers leaves out its score.bias, so scores there are lower by {bias:g}"
        if verify:
            from megarl.engine.hf.verify import compare  # Megatron and transformers take seconds to import

            lines.append(compare(source, partial))
        checkpoint = source.resolve().parent
        step = step_of(checkpoint) if NAME.fullmatch(checkpoint.name) else None
        lines.append(describe(partial, source, dtype, record_all(partial, plan.filename_to_tensors), step))
        os.replace(partial, out)
    sync_directory(out.parent)
    return "\n".join(lines)


def export_peft(
    run_or_checkpoint: str | Path, out: str | Path, role: str = "actor", base_model: str | None = None
) -> str:
    """Write `out` as PEFT and servers read adapters, of a checkpoint with LoRA; returns lines about it.

    `base_model`: what they are adapters of; None: the model folder that the run began with. Raises as `export_hf`, and
    ConfigError where the role has no adapters.
    """
    out = Path(out)
    with new_folder(out) as partial:
        source = role_folder(run_or_checkpoint, role)
        weights = RoleWeights(source)
        if weights.lora is None:
            raise ConfigError(f"{source} has no adapters: it was trained whole (roles.{role}.lora)")
        head = (
            {name: tensor for name, tensor in weights.hf_tensors() if name.startswith("score.")}
            if weights.head == "value"
            else {}
        )
        copy_small_files(source / HF_FOLDER, partial)
        for name in ("config.json", "generation_config.json"):  # which are the base model's
            (partial / name).unlink(missing_ok=True)
        base_model = base_model or began_with(source.resolve().parent, role)
        write_peft(partial, base_model, weights.lora, weights.shape, weights.adapters(), head)
        line = describe(partial, source, weights.dtype, record_all(partial, ["adapter_model.safetensors"]))
        os.replace(partial, out)
    sync_directory(out.parent)
    return f"wrote {out} from {source}, adapters of {base_model}\n{line}"


def began_with(checkpoint: Path, role: str) -> str:
    """The model folder that a role of a run began with."""
    file = checkpoint / CONFIG
    if not file.is_file():
        raise ConfigError(f"{file} does not exist, which names the base model: --base-model does too")
    config = read_config(file)
    return (config["roles"].get(role) or {}).get("path") or config["model"]["path"]


def plan_files(shapes: dict[str, torch.Tensor], max_shard_size: str) -> StateDictSplit:
    """Which tensor goes into which file."""
    try:
        return split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard_size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size: {error}") from error


def write_config(file: Path, dtype: str, head: str) -> None:
    """Change the config.json that the model had: transformers loads weights in the dtype that it names."""
    config = json.loads(file.read_text())
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}  # the older key
    config |= classifier_keys(config) if head == "value" else language_model_keys(config)
    file.write_text(json.dumps(config, indent=2) + "\n")


def language_model_keys(config: dict) -> dict:
    """SGLang finds its class by the architecture."""
    if config.get("architectures"):
        return {}
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]}


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
