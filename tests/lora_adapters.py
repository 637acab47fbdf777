"""LoRA adapters put by hand into transformers' model, and the same ones put into an engine."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from gradients import full_gradients
from safetensors.torch import load_file

from megarl.config_lora import ATTENTION, MATRICES, LoraConfig

LORA = LoraConfig(rank=4, alpha=6.0)
SCALE = 1.5


@dataclass
class AdaptedModel:
    """By transformers, in float32. Adapters are named LAYER.MATRIX.a and LAYER.PROJECTION.b."""

    folder: Path
    adapters: dict[str, np.ndarray]  # as such they travel to other processes without a file descriptor each
    gradients: dict[str, torch.Tensor]  # of the adapters
    start: list[torch.Tensor]  # log-probs of each sequence without adapters
    logprobs: list[torch.Tensor]  # with them
    loss: float  # their mean over all tokens, negative
    weights: dict[str, torch.Tensor]  # those of the folder's file with the adapters merged in


def adapted_model(folder: Path, matrices, sequences: list[list[int]], std: float = 0.2) -> AdaptedModel:
    """`matrices`: those of MATRICES that get an adapter, whose values show every mistake."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = [hf_logprobs(model, ids).detach() for ids in sequences]
    adapters = put_adapters(model, matrices, std)
    logprobs = [hf_logprobs(model, ids) for ids in sequences]
    loss = -torch.cat(logprobs).mean()
    loss.backward()
    values = {name: parameter.detach().numpy() for name, parameter in adapters.items()}
    gradients = {name: parameter.grad for name, parameter in adapters.items()}
    weights = merged(load_file(folder / "model.safetensors"), values)
    return AdaptedModel(folder, values, gradients, start, [x.detach() for x in logprobs], loss.item(), weights)


def hf_logprobs(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


def put_adapters(model, matrices, std: float) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.nn.Parameter(std * torch.randn(shape, generator=generator))

    adapters = {}
    for i, layer in enumerate(model.model.layers):
        for matrix in matrices:
            holder = layer.self_attn if matrix in ATTENTION else layer.mlp
            linears = {name: getattr(holder, name) for name in MATRICES[matrix]}
            a = adapters[f"{i}.{matrix}.a"] = drawn(LORA.rank, next(iter(linears.values())).in_features)
            for name, linear in linears.items():
                b = adapters[f"{i}.{name}.b"] = drawn(linear.out_features, LORA.rank)
                linear.register_forward_hook(lambda _, x, output, a=a, b=b: output + SCALE * (x[0] @ a.T @ b.T))
    return adapters


def merged(weights: dict[str, torch.Tensor], adapters: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    for name in weights:
        if found := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(\w+_proj)\.weight", name):
            layer, projection = found.groups()
            matrix = next(matrix for matrix, projections in MATRICES.items() if projection in projections)
            weights[name] += SCALE * torch.tensor(adapters[f"{layer}.{projection}.b"] @ adapters[f"{layer}.{matrix}.a"])
    return weights


def adapter_parameters(engine):
    """(place in the model, parameter, names of the adapters that it holds) of this rank."""
    from megarl.engine.model import parameters_of

    for chunk in engine.chunks:
        for key, parameter in parameters_of(chunk, engine.shape):
            if key.adapted is not None:
                *_, matrix, kind, _ = key.line.split(".")
                names = [f"{matrix}.a"] if kind == "lora_a" else [f"{name}.b" for name in MATRICES[matrix]]
                yield key, parameter, [f"{key.layer}.{name}" for name in names]


@torch.no_grad()
def fill(engine, adapters: dict[str, np.ndarray]) -> None:
    from megarl.engine.hf.mapping import to_shard
    from megarl.engine.model import tensor_parallel_place

    for key, parameter, names in adapter_parameters(engine):
        tensors = [torch.tensor(adapters[name]) for name in names]
        if key.partition_dim >= 0:
            tensors = [to_shard(engine.shape, key.adapted, tensors, *tensor_parallel_place(key))]
        parameter.copy_(torch.cat(tensors))


def whole_adapters(engine, read):
    """(name, what `read` gives of an adapter, put together), of this stage."""
    from megarl.engine import parallel
    from megarl.engine.hf.mapping import from_shards

    for key, parameter, names in adapter_parameters(engine):
        shards = [read(parameter)]
        if key.partition_dim >= 0:
            shards = from_shards(engine.shape, key.adapted, parallel.tensor_parallel_all_gather(shards[0]))
        yield from zip(names, shards, strict=True)


def adapter_gradients(engine) -> dict:
    """name -> gradient as numpy array, as `full_gradients` gives those of all weights."""
    return full_gradients(
        SimpleNamespace(runnable=engine.runnable, hf_tensors=lambda read: whole_adapters(engine, read))
    )
