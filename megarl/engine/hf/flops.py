"""Floating-point operations and parameters of a model, counted from its shape.

The count is that of model FLOPs utilisation: 2 per multiply-add of the matrix products that the model's definition
needs, without norms, softmax and recomputed activations (PaLM, arXiv:2204.02311, appendix B; Megatron-LM,
arXiv:2104.04473, appendix). Both papers count attention in full; here its causal half is counted, which is all that
is computed.
"""

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.shape import ModelShape


def forward_flops(shape: ModelShape, length: int) -> float:
    """Of one causal sequence of `length` tokens through all layers and the LM head.

    Training takes three times as many: each product has two in its gradient, by the input and by the weight.
    """
    per_layer = attention_weights(shape) + mlp_weights(shape, shape.experts_per_token)
    products = 2 * length * (shape.num_layers * per_layer + shape.hidden_size * shape.vocab_size)
    # Scores and weighted values: 2 products of 2 * head_dim * length^2 operations each, half of them behind the mask.
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length**2
    return float(products + attention)


def parameter_count(shape: ModelShape) -> int:
    """Of the whole model: a tied output layer counts once, every expert counts."""
    hidden, heads, kv_heads = shape.hidden_size, shape.num_heads, shape.num_kv_heads
    arguments = FAMILIES[shape.family].transformer_arguments(shape)
    biases = (heads + 2 * kv_heads) * shape.head_dim if arguments["add_qkv_bias"] else 0
    norms = 2 * hidden + (2 * shape.head_dim if arguments.get("qk_layernorm") else 0)
    per_layer = attention_weights(shape) + mlp_weights(shape, shape.num_experts) + biases + norms
    embeddings = (1 if shape.tied else 2) * shape.vocab_size * hidden
    return shape.num_layers * per_layer + embeddings + hidden  # and the last norm


def attention_weights(shape: ModelShape) -> int:
    """Of the query, key, value and output projections of a layer."""
    return shape.hidden_size * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)


def mlp_weights(shape: ModelShape, num_experts: int) -> int:
    """Of gate, up and down of a layer; in a mixture of experts those of its router and of `num_experts` experts."""
    if shape.num_experts == 0:
        return 3 * shape.hidden_size * shape.ffn_hidden_size
    return shape.hidden_size * (shape.num_experts + num_experts * 3 * shape.moe_ffn_hidden_size)
