"""Where a checkpoint keeps each weight of a model: its key, its size and its place among the layers and experts.

The same for every parallel layout and for both layer implementations: the layers of a model are stacked along a
first dimension, the experts of a layer along a second one, and a norm that transformer-engine fuses has the name that
it has there.
"""

from dataclasses import dataclass

import torch

from megarl.engine.hf import FAMILIES
from megarl.engine.hf.mapping import FUSED_NORMS, VALUE_HEAD, VOCABULARY, Parameter, from_shards, padded_vocab_size
from megarl.engine.hf.shape import ModelShape

FINAL_NORM = "decoder.final_layernorm.weight"


@dataclass(frozen=True)
class StoredWeight:
    parameter: Parameter
    key: str
    stack: tuple[int, ...]  # (), (layers,) or (layers, experts): what comes before the weight's own dimensions
    index: tuple[int, ...]  # in the stack
    size: tuple[int, ...]  # its own; a vocabulary is padded as for one rank

    def fits(self, stored: torch.Size) -> bool:
        """Whether a checkpoint's tensor may hold it: more ranks pad a vocabulary further."""
        expected = torch.Size(self.stack + self.size)
        if self.parameter.line in VOCABULARY:
            return stored[1:] == expected[1:] and stored[0] % 64 == 0 and stored[0] >= expected[0]
        return stored == expected

    def hf_shapes(self, shape: ModelShape) -> dict[str, torch.Size]:
        """Of the HF tensors that it holds, in the table's order."""
        tensors = from_shards(shape, self.parameter, [torch.empty(self.size, device="meta")])
        return {name: tensor.shape for name, tensor in zip(self.parameter.hf_names(shape), tensors, strict=True)}


def stored_weights(shape: ModelShape, head: str) -> list[StoredWeight]:
    """All weights of a model with this head ("lm" or "value"), from the embedding to the head. A tied output layer is
    no weight of its own."""
    table = FAMILIES[shape.family].MAPPING | (VALUE_HEAD if head == "value" else {})
    lines = [line for line in table if line != "output_layer.weight" or (head == "lm" and not shape.tied)]
    of_layers = [line for line in lines if "{layer}" in line]
    others = [line for line in lines if line not in of_layers and line != VOCABULARY[0]]
    weights = [_stored(shape, VOCABULARY[0])]
    for layer in range(shape.num_layers):
        for line in of_layers:
            experts = range(shape.num_experts) if "{expert}" in line else [None]
            weights += [_stored(shape, line, layer, expert) for expert in experts]
    others.sort(key=lambda line: line != FINAL_NORM)
    return weights + [_stored(shape, line) for line in others]


def _stored(shape: ModelShape, line: str, layer: int | None = None, expert: int | None = None) -> StoredWeight:
    places = [(layer, shape.num_layers), (expert, shape.num_experts)]
    index, stack = zip(*[place for place in places if place[0] is not None]) if layer is not None else ((), ())
    return StoredWeight(Parameter(line, layer, expert), stored_key(shape, line), stack, index, weight_size(shape, line))


def stored_key(shape: ModelShape, line: str) -> str:
    """`line`: of a family's table."""
    key = line.replace("value_head.", "output_layer.").replace(".{layer}", "").replace(".{expert}", ".experts")
    for fused, norm in FUSED_NORMS.items():
        if key.endswith(f".{norm}") and not (shape.num_experts and fused.startswith("mlp.")):  # experts share one norm
            key = key.removesuffix(norm) + fused
    return key


def weight_size(shape: ModelShape, line: str) -> tuple[int, ...]:
    """Of the whole parameter, vocabulary padded for one rank; norms have the model's hidden size."""
    hidden, vocabulary = shape.hidden_size, padded_vocab_size(shape, tensor_parallel=1)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ffn = shape.moe_ffn_hidden_size if shape.num_experts else shape.ffn_hidden_size
    sizes = {
        "word_embeddings.weight": (vocabulary, hidden),
        "output_layer.weight": (vocabulary, hidden),
        "value_head.weight": (1, hidden),
        "value_head.bias": (1,),
        "linear_qkv.weight": (queries + 2 * keys, hidden),
        "linear_qkv.bias": (queries + 2 * keys,),
        "q_layernorm.weight": (shape.head_dim,),
        "k_layernorm.weight": (shape.head_dim,),
        "linear_proj.weight": (hidden, queries),
        "router.weight": (shape.num_experts, hidden),
        "linear_fc1.weight": (2 * ffn, hidden),
        "linear_fc2.weight": (hidden, ffn),
    }
    return sizes.get(".".join(line.split(".")[-2:]), (hidden,))
