"""LoRA adapters of a checkpoint: where they are stored, merged into weights, or as PEFT has them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.config_lora import ATTENTION, LoraConfig
from megarl.engine.hf.layout import StoredWeight, stored_key, weight_size
from megarl.engine.hf.mapping import Parameter, from_shards
from megarl.engine.hf.shape import ModelShape

PREFIX = "base_model.model."  # PEFT's, before the names of the model that it wraps


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A in float32, then in W's dtype."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale).to(weight.dtype)


def stored_adapters(shape: ModelShape, lora: LoraConfig) -> list[StoredWeight]:
    """All matrices A [rank, in] and B [out, rank]; `adapted` of a weight's `parameter` is what they belong to."""
    found = []
    for matrix in lora.matrices(shape):
        module = f"decoder.layers.{{layer}}.{'self_attention' if matrix in ATTENTION else 'mlp'}.{matrix}"
        rows, columns = weight_size(shape, f"{module}.weight")
        for name, size in (("lora_a", (lora.rank, columns)), ("lora_b", (rows, lora.rank))):
            line = f"{module}.{name}.weight"
            key, stack = stored_key(shape, line), (shape.num_layers,)
            layers = range(shape.num_layers)
            found += [StoredWeight(Parameter(line, layer, None), key, stack, (layer,), size) for layer in layers]
    return found


def peft_tensors(shape: ModelShape, adapters: Mapping[Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
    """PEFT's name -> a matrix of its own: of a fused matrix each projection has the A and its rows of the B.

    `adapters`: the whole matrices, of any layers.
    """
    tensors = {}
    for key, matrix in adapters.items():
        names, is_a = key.adapted.hf_names(shape), key.line.endswith("lora_a.weight")
        parts = [matrix] * len(names) if is_a else from_shards(shape, key.adapted, [matrix])
        for name, part in zip(names, parts, strict=True):
            tensors[f"{PREFIX}{name.removesuffix('.weight')}.lora_{'A' if is_a else 'B'}.weight"] = part.clone()
    return tensors


def write_peft(
    out: Path,
    base_model: str,
    lora: LoraConfig,
    shape: ModelShape,
    adapters: Mapping[Parameter, torch.Tensor],
    head: Mapping[str, torch.Tensor],
) -> None:
    """Put into the folder `out` what PEFT's `from_pretrained` and servers read: adapters of the model `base_model`.

    `head`: a value head's tensors by their HF names, which make it a sequence classifier's; {} where there is none.
    """
    settings = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": lora.projections(shape),
        "modules_to_save": ["score"] if head else None,
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    tensors = peft_tensors(shape, adapters) | {PREFIX + name: tensor.contiguous() for name, tensor in head.items()}
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
