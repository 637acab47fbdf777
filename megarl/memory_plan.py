"""GPU memory of a run, estimated from its config and its models' shapes: which phase needs what. No GPU, no torch.

Within 6 % of what was measured on H200s (tests/test_memory_plan.py), 1 % of an update's tensors at DP 2 and TP 2. Not
measured: experts, pipelines, recomputation, LoRA. Activations are those of transformer-engine's layers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, cast

import pynvml

from megarl.config_checks import model_shape
from megarl.config_role_checks import why_not_transformer_engine
from megarl.engine.hf import FAMILIES
from megarl.engine.hf.flops import attention_weights, mlp_weights, parameter_count
from megarl.engine.hf.shape import ModelShape
from megarl.machine import sees_gpu
from megarl.presets import WITH_REFERENCE
from megarl.rollout.server import COLOCATED_DEFAULTS

if TYPE_CHECKING:
    from megarl.config import Config, LayoutConfig, RoleConfig

H200_BYTES = 150e9
# CUDA context, libraries, NCCL: half of what trainer and sleeping server held beyond their tensors on one H200.
PROCESS_BYTES = 1.6e9
HOST_OPTIMIZER_BYTES = 3 * 2**30  # engine/host_optimizer.py has three parts of master weights and moments on the GPU
# SGLang 0.5.17's own reckoning (its _handle_gpu_memory_settings) for GPUs of 60 to 160 GiB
PREFILL_CHUNK = 8192  # tokens
GRAPH_BATCH = 256  # sequences
BYTES_PER_CHUNK_TOKEN = 1.5 * 2**20
BYTES_PER_GRAPH_SEQUENCE = 2 * 2**20
SPARE_BYTES = 512 * 2**20
LEAST_RESERVE_BYTES = 10 * 2**30

REMEDIES = {  # phase -> the keys that make it less
    "generate": "rollout.server_args.mem_fraction_static, roles.ROLE.offload",
    "score": "roles.ROLE.max_tokens_per_gpu, offload, host_optimizer",
    "update": "roles.ROLE.max_tokens_per_gpu, recompute, host_optimizer; more ranks",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of a role in a phase (generate, score, update) on the fullest of its GPUs."""

    role: str
    phase: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0

    @property
    def tensors(self) -> float:
        return sum(getattr(self, part) for part in PARTS)


PARTS = [field.name for field in fields(Memory)][2:]


@dataclass(frozen=True)
class Stage:
    """A rank of a role in the first pipeline stage, in the last one, or in the only one, which is both."""

    shape: ModelShape
    role: "RoleConfig"  # of a reward model a LayoutConfig: what is missing there is of updates
    width: int  # bytes of a number
    has_logits: bool
    first: bool
    last: bool

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers // self.role.pipeline_parallel


def memory_rows(config: "Config", gpu_bytes: float) -> list[Memory]:
    """What each role holds in the phases that it takes part in."""
    rows = [server_memory(config, section, gpu_bytes) for section in config.servers]
    for name in config.roles.megatron:
        for phase in phases_of(config, name):
            found = (stage_memory(config, name, phase, stage) for stage in stages_of(config, name))
            rows.append(max(found, key=lambda memory: memory.tensors))
    return rows


def phases_of(config: "Config", name: str) -> list[str]:
    algorithm = config.algorithm
    scores = name != "actor" or algorithm.old_logprobs == "recompute" or config.roles.reference.enabled
    if algorithm.is_supervised:
        scores = algorithm.name in WITH_REFERENCE
    return ["score"] * scores + ["update"] * (name in config.roles.trained)


def stages_of(config: "Config", name: str) -> list[Stage]:
    shape, role = model_shape(config, config.model_of(name).path), cast("RoleConfig", config.roles.megatron[name])
    has_logits = name == "actor" and config.algorithm.name != "reward_model"
    places = [(True, False), (False, True)] if role.pipeline_parallel > 1 else [(True, True)]
    return [Stage(shape, role, width(config), has_logits, *place) for place in places]


def width(config: "Config") -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def stage_memory(config: "Config", name: str, phase: str, stage: Stage) -> Memory:
    role, shape = stage.role, stage.shape
    weights = weight_bytes(stage)
    gradients = optimizer = 0.0
    trained = config.roles.trained.get(name)
    if trained is not None and (phase == "update" or offload_of(config, trained) == "none"):
        gradients, optimizer = sum(trained_parameters(stage)) * 4, optimizer_bytes(stage)
        if trained.host_optimizer:
            optimizer = min(optimizer, HOST_OPTIMIZER_BYTES) if phase == "update" else 0.0
    if phase == "update":
        kept, again = activation_bytes(stage)
        per_token = kept * layers_in_flight(stage) + again
    else:
        if name == "actor" and has_reference(config):
            weights += sum(trained_parameters(stage)) * stage.width  # the reference's, beside the policy's own
        per_token = stage.width * (3 * shape.hidden_size + mlp_numbers(stage))  # the widest part of a layer
    tokens = micro_batch_tokens(config, role)
    logits = padded_vocabulary(stage) / role.tensor_parallel * stage.width if stage.last and stage.has_logits else 0.0
    return Memory(name, phase, weights, gradients, optimizer, tokens * per_token, tokens * logits)


def offload_of(config: "Config", role: "RoleConfig") -> str:
    return role.offload or ("all" if config.placement == "colocated" and config.servers else "none")


def has_reference(config: "Config") -> bool:
    algorithm = config.algorithm
    return algorithm.name in WITH_REFERENCE if algorithm.is_supervised else config.roles.reference.enabled


def micro_batch_tokens(config: "Config", role: "LayoutConfig") -> int:
    """Of a rank: the budget, or a sample of the greatest length where that is more."""
    if config.algorithm.is_supervised:
        return role.max_tokens_per_gpu
    return max(role.max_tokens_per_gpu, -(-sample_tokens(config) // role.context_parallel))


def sample_tokens(config: "Config") -> int:
    return config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens


def padded_vocabulary(stage: Stage) -> int:
    """Rows of the embedding, as `megarl.engine.hf.mapping.padded_vocab_size`."""
    multiple = 64 * stage.role.tensor_parallel
    return -(-stage.shape.vocab_size // multiple) * multiple


def parameters(stage: Stage) -> tuple[float, float]:
    """(parameters outside of experts, those of experts) of the rank."""
    shape, role = stage.shape, stage.role
    arguments = FAMILIES[shape.family].transformer_arguments(shape)
    norms = 2 * shape.hidden_size + (2 * shape.head_dim if arguments.get("qk_layernorm") else 0)
    router = mlp_weights(shape, 0) if shape.num_experts else 0
    mlp = mlp_weights(shape, shape.num_experts) - router
    split = attention_weights(shape) + (0 if shape.num_experts else mlp)
    if arguments["add_qkv_bias"]:
        split += (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    experts = mlp / (role.expert_parallel * role.expert_tensor_parallel) if shape.num_experts else 0.0
    has_output = stage.last and stage.has_logits and not (stage.first and shape.tied)
    vocabulary = (stage.first + has_output) * padded_vocabulary(stage) * shape.hidden_size / role.tensor_parallel
    dense = stage.num_layers * (split / role.tensor_parallel + norms + router)
    return dense + vocabulary + shape.hidden_size * stage.last, stage.num_layers * experts


def trained_parameters(stage: Stage) -> tuple[float, float]:
    """The same of what is trained: all of it, or the adapters."""
    shape, role = stage.shape, stage.role
    if (lora := role.lora) is None:
        return parameters(stage)
    inner, tensor = shape.num_heads * shape.head_dim, role.tensor_parallel
    sides = {  # both of a matrix; the inner one is split over TP ranks
        "linear_qkv": shape.hidden_size + (inner + 2 * shape.num_kv_heads * shape.head_dim) / tensor,
        "linear_proj": inner / tensor + shape.hidden_size,
        "linear_fc1": shape.hidden_size + 2 * shape.ffn_hidden_size / tensor,
        "linear_fc2": shape.ffn_hidden_size / tensor + shape.hidden_size,
    }
    return stage.num_layers * lora.rank * sum(sides[matrix] for matrix in lora.matrices(shape)), 0.0


def weight_bytes(stage: Stage) -> float:
    """Of the model, and of adapters beside it."""
    adapters = sum(trained_parameters(stage)) if getattr(stage.role, "lora", None) else 0.0
    return (sum(parameters(stage)) + adapters) * stage.width


def optimizer_bytes(stage: Stage) -> float:
    """Master weights and two moments in float32, spread over the data-parallel ranks, those of experts over the ranks
    that hold the same experts. In float32 the weights are their own masters."""
    role, (dense, experts) = stage.role, trained_parameters(stage)
    copies = role.data_parallel * role.context_parallel
    expert_copies = role.world_size / (role.pipeline_parallel * role.expert_parallel * role.expert_tensor_parallel)
    return (12 if stage.width == 2 else 8) * (dense / copies + experts / expert_copies)


def activation_bytes(stage: Stage) -> tuple[float, float]:
    """(What a layer keeps for the backward pass, what the layer that is computed again takes), per token.

    Of attention: the norm's input and output, the fused query, key and value, query and key rotated, and the result; of
    the MLP: the norm's input and output, gate and up, their product.
    """
    shape, role = stage.shape, stage.role
    hidden = shape.hidden_size / (role.tensor_parallel if role.sequence_parallel else 1)
    head = shape.head_dim / role.tensor_parallel
    rotated = head * (shape.num_heads + shape.num_kv_heads)
    attention = 2 * head * (shape.num_heads + shape.num_kv_heads) + rotated
    whole = 4 * hidden + attention + mlp_numbers(stage)
    if role.recompute == "none":
        return stage.width * whole, 0.0
    if role.recompute == "full":
        return stage.width * hidden, stage.width * whole
    sizes = {"core_attn": rotated, "mlp": hidden + mlp_numbers(stage), "moe": mlp_numbers(stage)}
    again = [sizes[module] for module in role.recompute_modules or ["moe" if shape.num_experts else "mlp"]]
    return stage.width * (whole - sum(again)), stage.width * max(again)


def mlp_numbers(stage: Stage) -> float:
    """Gate, up and product of a token; with experts each chosen one has a copy of the token too. All experts are taken
    to get equally many."""
    shape, role = stage.shape, stage.role
    if not shape.num_experts:
        return 3 * shape.ffn_hidden_size / role.tensor_parallel
    copies = shape.experts_per_token / role.tensor_parallel  # each TP rank routes its own part of the tokens
    return copies * (role.expert_tensor_parallel * shape.hidden_size + 3 * shape.moe_ffn_hidden_size)


def layers_in_flight(stage: Stage) -> float:
    """Layers whose activations the rank holds at a time. The first of P stages has P micro-batches under way, with
    interleaving a share more: arXiv:2205.05198, section 4.2.3."""
    pipeline, chunks = stage.role.pipeline_parallel, stage.role.virtual_pipeline_parallel
    if not stage.first or pipeline == 1:
        return stage.num_layers
    return stage.shape.num_layers * (1 + (pipeline - 1) / (pipeline * chunks) if chunks > 1 else 1)


def server_memory(config: "Config", section: str, gpu_bytes: float) -> Memory:
    """Of a rank of an SGLang server: `mem_fraction_static` is for weights and KV cache together."""
    group = config.servers[section]
    weights = parameter_count(server_shape(config, section)) * width(config) / group.tensor_parallel
    cache = max(0.0, static_fraction(config, section, gpu_bytes) * (gpu_bytes - PROCESS_BYTES) - weights)
    cache = min(cache, number(group.server_args, "max_total_tokens", math.inf) * token_cache_bytes(config, section))
    phase = "generate" if section == "rollout" else "score"
    activations = server_activations(group.server_args)
    return Memory(section.removeprefix("roles."), phase, weights, activations=activations, kv_cache=cache)


def server_shape(config: "Config", section: str) -> ModelShape:
    name = "actor" if section == "rollout" else section.removeprefix("roles.")
    return model_shape(config, config.model_of(name).path)


def server_activations(args: dict) -> float:
    """What SGLang reckons with for a chunk of prompts and for its CUDA graphs."""
    chunk = number(args, "chunked_prefill_size", PREFILL_CHUNK)
    graphs = number(args, "cuda_graph_max_bs", GRAPH_BATCH)
    if isinstance(args.get("cuda_graph_bs"), list):
        graphs = max(args["cuda_graph_bs"])
    chunk_bytes = (chunk if chunk > 0 else PREFILL_CHUNK) * BYTES_PER_CHUNK_TOKEN
    return SPARE_BYTES + chunk_bytes + (0 if args.get("disable_cuda_graph") else graphs * BYTES_PER_GRAPH_SEQUENCE)


def number(args: dict, key: str, default: float) -> float:
    """An option of SGLang's that is a number; where it is not, SGLang has the last word."""
    value = args.get(key)
    return value if isinstance(value, int | float) else default


def static_fraction(config: "Config", section: str, gpu_bytes: float) -> float:
    """As given; else megarl's where GPUs are shared, or what SGLang takes."""
    group = config.servers[section]
    if section == "rollout" and config.placement == "colocated":
        usual = COLOCATED_DEFAULTS["mem_fraction_static"]
    else:
        reserve = server_activations(group.server_args) + group.tensor_parallel * 2**30 / 8
        usual = 1 - max(reserve, LEAST_RESERVE_BYTES) / gpu_bytes
    return number(group.server_args, "mem_fraction_static", usual)


def token_cache_bytes(config: "Config", section: str) -> float:
    """Keys and values of a token on a rank, which has a key/value head at least."""
    shape = server_shape(config, section)
    heads = max(1, shape.num_kv_heads // config.servers[section].tensor_parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * width(config)


def by_gpu(config: "Config", rows: list[Memory]) -> list[tuple[str, dict[str, float]]]:
    """(Roles that share GPUs, phase -> what they hold there together).

    Colocated, a server that is not at work keeps its process alone, and an engine also what its `offload` leaves there;
    actor and critic score at the same time, and are updated in turns.
    """
    found = list(dict.fromkeys(row.role for row in rows))
    shared = [role for role in found if role in ("rollout", *config.roles.trained)]
    if config.placement == "disaggregated" or not config.servers:
        shared = []
    groups = [shared] * bool(shared) + [[role] for role in found if role not in shared]
    stays = {row.role: left_by_offload(config, row) for row in rows if row.phase == "update"}
    result = []
    for roles in groups:
        idle = sum(stays.get(role, 0.0) for role in roles)
        phases: dict[str, float] = {}
        for phase in REMEDIES:
            present = [row for row in rows if row.role in roles and row.phase == phase]
            if not present:
                continue
            held = [row.tensors for row in present]
            if phase == "update":
                held = [max(row.tensors + idle - stays[row.role] for row in present)]
            elif phase == "generate":
                held.append(idle)
            phases[phase] = sum(held) + len(roles) * PROCESS_BYTES
        result.append((" + ".join(roles), phases))
    return result


def left_by_offload(config: "Config", update: Memory) -> float:
    """What an engine keeps on its GPUs while it is not at work."""
    offload = offload_of(config, config.roles.trained[update.role])
    if offload == "all":
        return 0.0
    return update.weights + (update.gradients + update.optimizer if offload == "none" else 0.0)


def host_bytes(config: "Config", name: str) -> float:
    """Of a node, for a trained role: what lives in host memory or is moved there, and the reference. Page-locked."""
    role, stage = config.roles.trained[name], stages_of(config, name)[0]
    offload = offload_of(config, role)
    held = optimizer_bytes(stage) if role.host_optimizer or offload != "none" else 0.0
    if offload == "all":
        held += weight_bytes(stage)
    if name == "actor" and has_reference(config):
        held += sum(trained_parameters(stage)) * stage.width
    return held * role.gpus_per_node


def gpu_bytes_here(config: "Config") -> float | None:
    """Of this machine's first GPU; None where there is none, or the run is for a cluster."""
    if config.cluster.ray_address is not None or not sees_gpu():
        return None
    pynvml.nvmlInit()
    try:
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total)
    finally:
        pynvml.nvmlShutdown()


def memory_lines(config: "Config") -> Iterator[str]:
    """For `--dry-run`: a row per role and phase, then what comes together on a GPU, in GB of 10^9 bytes."""
    here = gpu_bytes_here(config)
    gpu_bytes = here or H200_BYTES
    size = f"{gpu_bytes / 1e9:.0f} GB"
    rows = memory_rows(config, gpu_bytes)
    yield f"GPU memory, estimated, in GB of {size}" + ("" if here else ", those of an H200: no GPU was asked")
    if config.model.transformer_impl == "local" or (here and why_not_transformer_engine(config)):
        yield "activations are those of transformer-engine's layers: the local ones keep two to three times as much"
    yield f"{'role':13} {'phase':8}" + "".join(f" {part.replace('_', ' '):>11}" for part in PARTS)
    for row in rows:
        numbers = [getattr(row, part) for part in PARTS]
        cells = [f" {number / 1e9:11.1f}" if number else f" {'-':>11}" for number in numbers]
        yield f"{row.role:13} {row.phase:8}" + "".join(cells)
    for roles, phases in by_gpu(config, rows):
        taken = ", ".join(f"{phase} {held / 1e9:.0f}" for phase, held in phases.items())
        too_much = [phase for phase, held in phases.items() if round(held / 1e9) > round(gpu_bytes / 1e9)]
        remedies = [f"{phase} DOES NOT FIT, less by {REMEDIES[phase]}" for phase in too_much]
        yield "; ".join([f"on a GPU of {roles}: {taken} of {size}", *remedies])
    if "rollout" in config.servers:
        yield cache_line(config, next(row.kv_cache for row in rows if row.role == "rollout"))
    held = {name: host_bytes(config, name) for name in config.roles.trained}
    if texts := [f"{name} {number / 1e9:.0f} GB" for name, number in held.items() if number]:
        yield "host memory of a node: " + ", ".join(texts)


def cache_line(config: "Config", cache: float) -> str:
    length, tokens = sample_tokens(config), int(cache / token_cache_bytes(config, "rollout"))
    samples = -(-config.prompts_per_round * config.algorithm.group_size // config.rollout.servers)
    text = f"KV cache of a server: {tokens:,} tokens, {tokens // length:,} samples of {length:,}"
    return f"{text}; it gets {samples:,} at a time"
