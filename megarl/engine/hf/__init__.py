"""Model families: what an HF config and its tensors are called, and what they are in Megatron-Core.

A family is one module with `MAPPING` (Megatron parameter name -> HF tensor names) and `transformer_arguments(hf)` (what
its HF config adds to Megatron's TransformerConfig), and one line below. One table serves loading, export and weight
sync: see mapping.py.
"""

from megarl.engine.hf import llama, qwen2

FAMILIES = {"llama": llama, "qwen2": qwen2}
