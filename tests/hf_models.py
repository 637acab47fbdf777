"""Tiny HF models with weights that show every mistake: no zeros, no ones, no symmetry."""

from pathlib import Path

import torch

# What a tiny model of a family needs besides the common shape.
FAMILY_SHAPES = {
    "mistral": {"head_dim": 8, "sliding_window": None},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def write_hf_model(
    folder: Path,
    family: str,
    tied: bool,
    vocab_size: int = 128,
    num_layers: int = 4,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides,
) -> Path:
    """Save a transformers model of `family` (HF's model_type) to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    config = AutoConfig.for_model(family, **shape | FAMILY_SHAPES.get(family, {}) | overrides)
    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise) if parameter.dim() == 1 else parameter.copy_(0.08 * noise)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def hf_named_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients of a transformers model under the names of its files, where each expert has tensors of its own."""
    gradients = {}
    for name, parameter in model.named_parameters():
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj":  # [experts, gate and up, hidden]
            for expert, gradient in enumerate(parameter.grad):
                gate, up = gradient.chunk(2)
                gradients |= {f"{base}.{expert}.gate_proj.weight": gate, f"{base}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            gradients |= {f"{base}.{expert}.down_proj.weight": x for expert, x in enumerate(parameter.grad)}
        else:
            gradients[name] = parameter.grad
    return gradients
