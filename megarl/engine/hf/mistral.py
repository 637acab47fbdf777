"""Mistral (HF `model_type: mistral`): Llama's tensors; without sliding windows, as from v0.2 on."""

from megarl.engine.hf import llama
from megarl.engine.hf.shape import ModelShape

MAPPING = llama.MAPPING


def transformer_arguments(shape: ModelShape) -> dict:
    if shape.hf.get("sliding_window"):
        raise ValueError("config.json: sliding_window is not supported for mistral")
    return {"add_qkv_bias": False}
