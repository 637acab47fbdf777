"""What a Megatron role's layout allows: sizes against each other, the model, the device and what is installed."""

import importlib.util
from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from megarl.config_lora import check_lora, check_lora_model
from megarl.config_violation import Violation, divisors, listed, nearest_multiples
from megarl.engine.hf.shape import ModelShape
from megarl.machine import resolve_device

if TYPE_CHECKING:
    from megarl.config import Config

LAYOUT_KEYS = ("gpus_per_node", "nodes", "tensor_parallel", "context_parallel", "pipeline_parallel")


def check_role(config: "Config", name: str) -> Iterator[Violation]:
    """What needs no look at the model."""
    yield from check_layout(config, name)
    yield from check_interleaving(config, name)
    yield from check_sequence_parallel(config, name)
    yield from check_context_parallel(config, name)
    if name in config.roles.trained:
        yield from check_recompute(config, name)
        yield from check_lora(config, name)


def check_role_model(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    """The layout against the model."""
    yield from check_heads(config, name, shape)
    yield from check_layers(config, name, shape)
    yield from check_experts(config, name, shape)
    if name in config.roles.trained:
        yield from check_recomputed_modules(config, name, shape)
        yield from check_lora_model(config, name, shape)


def check_layout(config: "Config", name: str) -> Iterator[Violation]:
    role = config.roles.megatron[name]
    keys = tuple(f"roles.{name}.{key}" for key in LAYOUT_KEYS)
    tensor, needed = role.tensor_parallel, role.model_parallel
    if role.world_size % needed:
        step = needed // gcd(role.nodes, needed)
        yield Violation(
            f"nodes * gpus_per_node = {role.nodes} * {role.gpus_per_node} = {role.world_size} is not divisible by "
            f"tensor_parallel * context_parallel * pipeline_parallel = {tensor} * {role.context_parallel} * "
            f"{role.pipeline_parallel} = {needed}; nearest valid gpus_per_node: {nearest_multiples(role.gpus_per_node, step)}",
            keys,
        )
    elif role.gpus_per_node % tensor and not (role.tensor_parallel_across_nodes and tensor % role.gpus_per_node == 0):
        across = f"roles.{name}.tensor_parallel_across_nodes"
        yield Violation(
            f"given {tensor}, but the {role.gpus_per_node} gpus_per_node must hold whole tensor-parallel groups; valid: "
            f"{listed(divisors(role.gpus_per_node))}, or with {across}: true a multiple of {role.gpus_per_node}",
            (f"roles.{name}.tensor_parallel", across, f"roles.{name}.gpus_per_node", f"roles.{name}.nodes"),
        )


def check_interleaving(config: "Config", name: str) -> Iterator[Violation]:
    role = config.roles.megatron[name]
    if role.virtual_pipeline_parallel > 1 and role.pipeline_parallel == 1:
        yield Violation(
            f"given {role.virtual_pipeline_parallel}, but roles.{name}.pipeline_parallel is 1: there is no pipeline to "
            f"interleave; valid: 1",
            (f"roles.{name}.virtual_pipeline_parallel", f"roles.{name}.pipeline_parallel"),
        )


def check_sequence_parallel(config: "Config", name: str) -> Iterator[Violation]:
    role = config.roles.megatron[name]
    if role.sequence_parallel and role.tensor_parallel == 1:
        keys = (f"roles.{name}.sequence_parallel", f"roles.{name}.tensor_parallel")
        yield Violation(f"given true, but roles.{name}.tensor_parallel is 1: there is nothing to split", keys)


def check_context_parallel(config: "Config", name: str) -> Iterator[Violation]:
    size = config.roles.megatron[name].context_parallel
    if size > 1 and (why := why_not_transformer_engine(config)):
        yield Violation(
            f"given {size}, but splitting a sequence over ranks needs transformer-engine's attention, and {why}; valid: 1",
            (f"roles.{name}.context_parallel", "model.transformer_impl", "model.dtype", "device"),
        )


def check_transformer_impl(config: "Config") -> Iterator[Violation]:
    if config.model.transformer_impl == "transformer_engine" and (why := why_not_transformer_engine(config)):
        keys = ("model.transformer_impl", "model.dtype", "device")
        yield Violation(f"given transformer_engine, but {why}; valid: auto, local", keys)


def why_not_transformer_engine(config: "Config") -> str | None:
    """Why the layers will not be transformer-engine's; None: they will, or another machine's installation decides."""
    if resolve_device(config) == "cpu":
        return "that runs on GPUs only, not with device: cpu"
    if config.model.dtype != "bfloat16":
        return f"that needs model.dtype: bfloat16, given {config.model.dtype}"
    if config.model.transformer_impl == "local":
        return "model.transformer_impl: local rules it out"
    if config.cluster.ray_address is None and importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed (launch/setup_env.sh gpu)"
    return None


def check_recompute(config: "Config", name: str) -> Iterator[Violation]:
    role = config.roles.trained[name]
    if role.recompute_modules is not None and role.recompute != "selective":
        yield Violation(
            f"given {role.recompute_modules}, but roles.{name}.recompute is {role.recompute}; they are for selective",
            (f"roles.{name}.recompute_modules", f"roles.{name}.recompute"),
        )


def check_recomputed_modules(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    modules = config.roles.trained[name].recompute_modules or []
    if shape.num_experts:
        absent, present, why = "mlp", "moe", "experts in place of MLPs"
    else:
        absent, present, why = "moe", "mlp", "no experts"
    if absent in modules:
        text = f"given {modules}, but the model ({shape.family}) has {why}; valid: core_attn, {present}"
        yield Violation(text, (f"roles.{name}.recompute_modules", "model.path"))


def check_heads(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    heads, groups = shape.num_heads, shape.num_kv_heads
    width = 0 if shape.num_experts else shape.ffn_hidden_size  # of experts: `check_experts`
    valid = divisors(gcd(heads, groups, width))
    size = config.roles.megatron[name].tensor_parallel
    if size not in valid:
        numbers = f"{heads} attention heads, {groups} key/value heads" + (
            f" and intermediate size {width}" if width else ""
        )
        yield Violation(
            f"given {size}, but the model has {numbers}, and it must divide all of them (more ranks than key/value heads "
            f"is not supported for a Megatron role); valid: {listed(valid)}",
            (f"roles.{name}.tensor_parallel", "model.path"),
        )


def check_layers(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    role = config.roles.megatron[name]
    pipeline, chunks = role.pipeline_parallel, role.virtual_pipeline_parallel
    if shape.num_layers % pipeline:
        yield Violation(
            f"given {pipeline}, but it must divide the model's {shape.num_layers} layers; "
            f"valid: {listed(divisors(shape.num_layers))}",
            (f"roles.{name}.pipeline_parallel", "model.path"),
        )
    elif pipeline > 1 and shape.num_layers // pipeline % chunks:
        yield Violation(
            f"given {chunks}, but it must divide the {shape.num_layers // pipeline} layers of a pipeline rank "
            f"({shape.num_layers} layers / pipeline_parallel {pipeline}); "
            f"valid: {listed(divisors(shape.num_layers // pipeline))}",
            (f"roles.{name}.virtual_pipeline_parallel", f"roles.{name}.pipeline_parallel", "model.path"),
        )


def check_experts(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    role = config.roles.megatron[name]
    keys = {key: f"roles.{name}.{key}" for key in ("expert_parallel", "expert_tensor_parallel", "sequence_parallel")}
    if not shape.num_experts:
        for key in ("expert_parallel", "expert_tensor_parallel"):
            if getattr(role, key) > 1:
                text = f"given {getattr(role, key)}, but the model ({shape.family}) has no experts; valid: 1"
                yield Violation(text, (keys[key], "model.path"))
        return
    if not 1 <= shape.experts_per_token <= shape.num_experts or shape.moe_ffn_hidden_size < 1:
        yield Violation(
            f"config.json has num_experts {shape.num_experts}, num_experts_per_tok {shape.experts_per_token} and "
            f"moe_intermediate_size {shape.moe_ffn_hidden_size}: no model",
            ("model.path",),
        )
        return
    if shape.num_experts % role.expert_parallel:
        yield Violation(
            f"given {role.expert_parallel}, but it must divide the model's {shape.num_experts} experts; "
            f"valid: {listed(divisors(shape.num_experts))}",
            (keys["expert_parallel"], "model.path"),
        )
    if shape.moe_ffn_hidden_size % role.expert_tensor_parallel:
        yield Violation(
            f"given {role.expert_tensor_parallel}, but it must divide an expert's intermediate size "
            f"{shape.moe_ffn_hidden_size}; valid: {listed(divisors(shape.moe_ffn_hidden_size))}",
            (keys["expert_tensor_parallel"], "model.path"),
        )
    tensor, expert_tensor = role.tensor_parallel, role.expert_tensor_parallel
    if resolve_device(config) == "cpu" and expert_tensor > 1 and (role.expert_parallel > 1 or expert_tensor != tensor):
        also = f", or {tensor} with expert_parallel 1" if tensor > 1 else ""
        yield Violation(
            f"given {expert_tensor} with expert_parallel {role.expert_parallel} and tensor_parallel {tensor}, but gloo gathers "
            f"equal numbers of tokens only; valid on a CPU: 1{also}",
            (keys["expert_tensor_parallel"], keys["expert_parallel"], f"roles.{name}.tensor_parallel", "device"),
        )
    ranks, needed = role.world_size // role.pipeline_parallel, role.expert_parallel * role.expert_tensor_parallel
    if ranks % needed and role.world_size % role.model_parallel == 0:
        yield Violation(
            f"expert_parallel * expert_tensor_parallel = {role.expert_parallel} * {role.expert_tensor_parallel} = {needed} "
            f"must divide the {ranks} ranks of a pipeline stage (world size {role.world_size} / pipeline_parallel "
            f"{role.pipeline_parallel}); valid products: {listed(divisors(ranks))}",
            (*keys.values(), *(f"roles.{name}.{key}" for key in LAYOUT_KEYS)),
        )
    if role.tensor_parallel > 1 and not role.sequence_parallel:
        yield Violation(
            f"given false, but a model with experts needs it with tensor_parallel {role.tensor_parallel}: each rank "
            f"routes its own part of the tokens; valid: true",
            (keys["sequence_parallel"], f"roles.{name}.tensor_parallel", "model.path"),
        )
