"""What no single key of a config can show: keys against each other, the model folder, the data files, the machine.

A check yields `Violation`s; a new check is a function and one line in CHECKS. None loads torch, ray or transformers.
"""

import json
import os
import re
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_role_checks import LAYOUT_KEYS, check_role, check_role_model, check_transformer_impl
from megarl.config_violation import Violation, divisors, listed, nearest_multiples, nearest_two
from megarl.engine.hf import FAMILIES
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError
from megarl.machine import resolve_device, sees_gpu, why_port_unusable
from megarl.rollout.server_args import check_server_args

if TYPE_CHECKING:
    from megarl.config import Config

GSPO_CLIP = 0.05
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def violations(config: "Config") -> list[Violation]:
    return [violation for find in CHECKS for violation in find(config)]


def check(config: "Config") -> list[str]:
    """All violations across keys, as `key: what is wrong, with the numbers and the valid choices`."""
    return [f"{violation.keys[0]}: {violation.text}" for violation in violations(config)]


def check_name(config: "Config") -> Iterator[Violation]:
    if not re.fullmatch(r"\w[\w.-]*", config.name):
        yield Violation(f"given {config.name!r}, but it names a folder: letters, digits, '_', '-' and '.'", ("name",))


def check_device(config: "Config") -> Iterator[Violation]:
    address, keys = config.cluster.ray_address, ("device", "cluster.ray_address")
    if config.device == "auto" and address is not None:
        text = f"given auto, but the GPUs of this machine say nothing of the cluster at {address}; valid: cpu, cuda"
        yield Violation(text, keys)
    if config.device == "cuda" and address is None and not sees_gpu():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no GPU is seen here" if hidden is None else f"no GPU is seen with CUDA_VISIBLE_DEVICES={hidden!r}"
        yield Violation(f"given cuda, but {why}; device: cpu runs on gloo", keys)


def check_ray_address(config: "Config") -> Iterator[Violation]:
    address = config.cluster.ray_address
    if address is not None and address != "auto" and not re.fullmatch(r"[\w.\[\]:-]+:\d+", address):
        text = f"given {address!r}, valid: HOST:PORT of a Ray head (no ray:// client address), auto for the cluster of this node"
        yield Violation(text, ("cluster.ray_address",))


def check_model(config: "Config") -> Iterator[Violation]:
    try:
        shape = model_shape(config)
    except ValueError as error:  # among them the ConfigErrors of ModelShape
        yield Violation(str(error), ("model.path", "toy.folder"))
        return
    yield from check_server_heads(config, shape)
    for name in config.roles.megatron:
        yield from check_role_model(config, name, shape)
    yield from check_context(config, shape)
    folder = Path(config.model.path)
    if is_toy_model(config):
        return
    if not any(folder.glob("*.safetensors")):
        yield Violation(f"no *.safetensors in {folder}", ("model.path", "toy.folder"))
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Violation(f"no tokenizer in {folder}: {' or '.join(TOKENIZER_FILES)}", ("model.path", "toy.folder"))


def check_server_heads(config: "Config", shape: ModelShape) -> Iterator[Violation]:
    heads, groups = shape.num_heads, shape.num_kv_heads
    width = shape.moe_ffn_hidden_size if shape.num_experts else shape.ffn_hidden_size
    # SGLang copies key/value heads where it has more ranks than those.
    valid = [ranks for ranks in divisors(gcd(heads, width)) if groups % ranks == 0 or ranks % groups == 0]
    if config.rollout.tensor_parallel not in valid:
        yield Violation(
            f"given {config.rollout.tensor_parallel}, but the model has {heads} attention heads, {groups} key/value heads "
            f"and intermediate size {width}, and it must divide the first and the last, and divide or be a multiple of the "
            f"second; valid: {listed(valid)}",
            ("rollout.tensor_parallel", "model.path"),
        )


def check_context(config: "Config", shape: ModelShape) -> Iterator[Violation]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens
    if prompt + response > shape.max_positions:
        yield Violation(
            f"data.max_prompt_tokens + rollout.sampling.max_new_tokens = {prompt} + {response} = {prompt + response} "
            f"is more than the model's max_position_embeddings = {shape.max_positions}",
            ("rollout.sampling.max_new_tokens", "data.max_prompt_tokens", "model.path"),
        )


def check_data(config: "Config") -> Iterator[Violation]:
    files = {
        "data.train": config.data.train,
        "data.validation": config.data.validation,
        "warm_start.data": config.warm_start.data,
    }
    for key, file in files.items():
        if file is not None and not is_toy_file(config, file) and not Path(file).is_file():
            yield Violation(f"no such file: {file}", (key, "toy.folder"))


def check_batch(config: "Config") -> Iterator[Violation]:
    algorithm, actor = config.algorithm, config.roles.actor
    prompts, group, mini = algorithm.prompts_per_step, algorithm.group_size, algorithm.mini_batch_size
    samples = prompts * group
    batch_keys = ("algorithm.mini_batch_size", "algorithm.prompts_per_step", "algorithm.group_size")
    actor_keys = tuple(f"roles.actor.{name}" for name in LAYOUT_KEYS)
    if group < 2 and algorithm.name != "reinforce_plus_plus":
        text = f"{algorithm.name} needs group_size >= 2, given {group}; reinforce_plus_plus does without groups"
        yield Violation(text, ("algorithm.group_size", "algorithm.name"))
    if mini is not None and samples % mini:
        near = nearest_multiples(prompts, mini // gcd(mini, group))
        yield Violation(
            f"given {mini}, but algorithm.prompts_per_step * algorithm.group_size = {prompts} * {group} = {samples} is "
            f"not a multiple of it; nearest valid mini_batch_size: {nearest_two(mini, divisors(samples))}; "
            f"nearest valid prompts_per_step: {near}",
            batch_keys,
        )
    if algorithm.samples_per_update < actor.data_parallel:
        yield Violation(
            f"an update has {algorithm.samples_per_update} samples (prompts_per_step {prompts}, group_size {group}, "
            f"mini_batch_size {'null' if mini is None else mini}), fewer than the {actor.data_parallel} data-parallel "
            f"ranks (roles.actor: {actor.sizes}); at least {actor.data_parallel} are needed",
            batch_keys + actor_keys,
        )


def check_algorithm(config: "Config") -> Iterator[Violation]:
    """Keys that only one choice of another reads: given for nothing, they would be silent."""
    algorithm = config.algorithm
    for key, reader, choice in (
        ("normalize_by_std", "name", "grpo"),
        ("dual_clip", "policy_loss", "dual_clip"),
        ("aggregation_length", "loss_aggregation", "constant"),
    ):
        given, used = getattr(algorithm, key), getattr(algorithm, reader)
        if given != type(algorithm).model_fields[key].default and used != choice:
            text = f"given {given}, but only algorithm.{reader}: {choice} reads it, and that is {used}"
            yield Violation(text, (f"algorithm.{key}", f"algorithm.{reader}"))
    for key in ("kl_estimator", "kl_importance_weighted"):
        given = getattr(algorithm, key)
        if algorithm.kl_coefficient == 0 and given != type(algorithm).model_fields[key].default:
            text = f"given {given}, but algorithm.kl_coefficient is 0: there is no KL term"
            yield Violation(text, (f"algorithm.{key}", "algorithm.kl_coefficient"))
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.policy_loss == "gspo" and widest > GSPO_CLIP:
        yield Violation(
            f"given gspo with clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g}, but it clips a sequence's "
            f"mean ratio, of which {widest:g} stops nothing (the paper has 3e-4 and 4e-4); at most {GSPO_CLIP:g}",
            ("algorithm.policy_loss", "algorithm.clip_low", "algorithm.clip_high"),
        )


def check_optimizer(config: "Config") -> Iterator[Violation]:
    sections = [
        (f"roles.{name}", role.optimizer, "trainer.steps", config.trainer.steps) for name, role in config.roles.megatron.items()
    ]
    if config.warm_start.data is not None:
        sections.append(("warm_start", config.warm_start.optimizer, "warm_start.steps", config.warm_start.steps))
    for section, optimizer, steps_key, num_steps in sections:
        betas, warmup = optimizer.betas, optimizer.warmup_steps
        if not all(0 <= beta < 1 for beta in betas):
            text = f"given {list(betas)}, allowed: two numbers >= 0 and < 1"
            yield Violation(text, (f"{section}.optimizer.betas",))
        if warmup > num_steps:
            text = f"given {warmup}, but the peak would not be reached in {steps_key} = {num_steps}"
            yield Violation(text, (f"{section}.optimizer.warmup_steps", steps_key))
        elif warmup == num_steps and optimizer.schedule != "constant":
            text = f"given {warmup}, but {steps_key} = {num_steps} leaves no step for schedule: {optimizer.schedule} to fall in"
            yield Violation(text, (f"{section}.optimizer.warmup_steps", steps_key))
        for key in ("decay_from", "final_fraction"):
            given = getattr(optimizer, key)
            if optimizer.schedule == "constant" and given != type(optimizer).model_fields[key].default:
                text = f"given {given}, but {section}.optimizer.schedule is constant; linear and cosine fall"
                yield Violation(text, (f"{section}.optimizer.{key}", f"{section}.optimizer.schedule"))


def check_sampling(config: "Config") -> Iterator[Violation]:
    sampling = config.rollout.sampling
    reason = "the server's log-probs are those before the cut"
    if sampling.top_p < 1:
        text = f"given {sampling.top_p}, allowed for training: 1.0; {reason}"
        yield Violation(text, ("rollout.sampling.top_p",))
    if sampling.top_k != -1:
        text = f"given {sampling.top_k}, allowed for training: -1 (all); {reason}"
        yield Violation(text, ("rollout.sampling.top_k",))


def check_reference(config: "Config") -> Iterator[Violation]:
    coefficient = config.algorithm.kl_coefficient
    if coefficient > 0 and not config.roles.reference.enabled:
        yield Violation(
            f"given {coefficient}, but the KL term needs roles.reference.enabled: true",
            ("algorithm.kl_coefficient", "roles.reference.enabled"),
        )


def check_reward(config: "Config") -> Iterator[Violation]:
    from megarl.rewards import REWARDS

    if config.algorithm.reward not in REWARDS:
        valid = listed(sorted(REWARDS))
        yield Violation(f"given {config.algorithm.reward!r}, valid: {valid}", ("algorithm.reward",))


def check_ports(config: "Config") -> Iterator[Violation]:
    ports, servers = config.rollout.ports, config.rollout.servers
    if ports is None:
        return
    if len(ports) != servers:
        text = f"{len(ports)} ports for {servers} rollout.servers; one each is needed"
        yield Violation(text, ("rollout.ports", "rollout.servers"))
    for port in sorted({port for port in ports if ports.count(port) > 1}):
        yield Violation(f"port {port} is given {ports.count(port)} times", ("rollout.ports",))
    for port in dict.fromkeys(ports):
        elsewhere = config.cluster.ray_address is not None and 1 <= port <= 65535  # each server looks at its own node's
        if not elsewhere and (reason := why_port_unusable(port)):
            yield Violation(f"port {port} {reason}", ("rollout.ports",))


def check_roles(config: "Config") -> Iterator[Violation]:
    for name in config.roles.megatron:
        yield from check_role(config, name)
    yield from check_transformer_impl(config)
    if config.roles.critic is not None:
        text = f"given, but algorithm.name: {config.algorithm.name} trains no critic"
        yield Violation(text, ("roles.critic", "algorithm.name"))


def check_placement(config: "Config") -> Iterator[Violation]:
    if config.placement == "disaggregated":
        return
    actor, rollout = config.roles.actor, config.rollout
    if actor.offload not in (None, "all"):
        text = f"given {actor.offload}, but with placement: colocated the actor leaves its GPUs to the servers; valid: all"
        yield Violation(text, ("roles.actor.offload", "placement"))
    if actor.nodes > 1:
        text = f"given {actor.nodes}, but placement: colocated hands weights over inside one machine; valid: 1"
        yield Violation(text, ("roles.actor.nodes", "placement"))
    needed = rollout.servers * rollout.tensor_parallel
    if needed > actor.gpus_per_node:
        yield Violation(
            f"servers * tensor_parallel = {rollout.servers} * {rollout.tensor_parallel} = {needed}, but with placement: "
            f"colocated they share the actor's roles.actor.gpus_per_node = {actor.gpus_per_node}",
            ("rollout.servers", "rollout.tensor_parallel", "roles.actor.gpus_per_node", "placement"),
        )


def check_checksum(config: "Config") -> Iterator[Violation]:
    if config.debug.sync_checksum and resolve_device(config) == "cpu":
        text = "given true, but SGLang's weights_checker works on GPUs only; valid with device: cpu: false"
        yield Violation(text, ("debug.sync_checksum", "device"))


def check_rollout_server_args(config: "Config") -> Iterator[Violation]:
    for key, text in check_server_args(config.rollout.server_args):
        yield Violation(text, (f"rollout.server_args.{key}",))


CHECKS = (
    check_name,
    check_device,
    check_ray_address,
    check_model,
    check_data,
    check_batch,
    check_roles,
    check_algorithm,
    check_optimizer,
    check_sampling,
    check_reference,
    check_reward,
    check_ports,
    check_placement,
    check_checksum,
    check_rollout_server_args,
)


def refuse_used_run(config: "Config") -> None:
    """Raise ConfigError where another run has left metrics in the run directory: they are never overwritten."""
    metrics = config.run_path / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError(f"name: {config.run_path} holds an earlier run; give this one another name (name=...) or remove it")


def model_shape(config: "Config") -> ModelShape:
    """Of the model folder, or of the toy model that the run will write there.

    Raises ValueError where config.json is missing, broken or of an unsupported model.
    """
    if is_toy_model(config):
        from megarl.data.toy import MODEL_CONFIG

        return ModelShape.from_hf(MODEL_CONFIG, where="the toy model")
    file = Path(config.model.path) / "config.json"
    if not file.parent.is_dir():
        raise ConfigError(f"no such folder: {file.parent}")
    if not file.is_file():
        raise ConfigError(f"no config.json in {file.parent}")
    try:
        hf = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(hf, dict):
            raise ConfigError(f"{file}: a JSON object is expected")
        shape = ModelShape.from_hf(hf, where=str(file))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from error
    except KeyError as error:
        raise ConfigError(f"{file}: no key {error}") from error
    FAMILIES[shape.family].transformer_arguments(shape)  # refuses the family's unsupported variants
    return shape


def is_toy_model(config: "Config") -> bool:
    return config.toy is not None and Path(config.model.path) == Path(config.toy.folder) / "model"


def is_toy_file(config: "Config", file: str) -> bool:
    """Whether the run writes it with the toy before it reads it."""
    from megarl.data.toy import FILES

    return config.toy is not None and Path(file) in [Path(config.toy.folder) / name for name in FILES]
