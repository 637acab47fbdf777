"""Tiny HF models with weights that show every mistake: no zeros, no ones, no symmetry."""

from pathlib import Path

import torch


def write_hf_model(folder: Path, family: str, tied: bool, vocab_size: int = 128, num_layers: int = 4, **overrides) -> Path:
    """Save a transformers model of `family` (qwen2, llama) in float32 to `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        **overrides,
    )
    generator = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise) if parameter.dim() == 1 else parameter.copy_(0.08 * noise)
    model.save_pretrained(folder)
    return folder
