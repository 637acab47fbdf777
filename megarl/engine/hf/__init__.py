"""Model families: what an HF config and its tensors are called, and what they are in Megatron-Core.

A family is one module with `MAPPING` (Megatron parameter name -> HF tensor names) and `transformer_arguments(shape)`
(what its HF config adds to Megatron's TransformerConfig), and one line below. One table serves loading, export and weight
sync: see mapping.py.
"""

from megarl.engine.hf import llama, mistral, qwen2, qwen3, qwen3_moe

FAMILIES = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
