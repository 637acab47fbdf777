"""What no single key of a config can show: keys against each other, the model folder, the data files, the machine.

A check yields `Violation`s; a new check is a function and one line in CHECKS. None loads torch, ray or transformers.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_algorithm_checks import check_algorithm
from megarl.config_checkpoint_checks import CHECKPOINT_CHECKS
from megarl.config_data_checks import DATA_CHECKS
from megarl.config_evaluation import check_evaluation
from megarl.config_monitor import check_monitor
from megarl.config_role_checks import check_role, check_role_model, check_transformer_impl
from megarl.config_violation import Violation, divisors, listed
from megarl.engine.hf import FAMILIES
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError
from megarl.machine import resolve_device, sees_gpu, why_port_unusable
from megarl.rollout.server import CLASSIFIERS
from megarl.rollout.server_args import check_server_args

if TYPE_CHECKING:
    from megarl.config import Config

REWARD_ROLES = ("reward_model", "reward_server")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def violations(config: "Config", to_run: bool = True) -> list[Violation]:
    """`to_run`: from this machine, and not only to be looked at."""
    checks = [*CHECKS, check_gpus_here] if to_run else CHECKS
    return [violation for find in checks for violation in find(config)]


def check(config: "Config") -> list[str]:
    """All violations across keys, as `key: what is wrong, with the numbers and the valid choices`."""
    return [f"{violation.keys[0]}: {violation.text}" for violation in violations(config)]


def check_name(config: "Config") -> Iterator[Violation]:
    if not re.fullmatch(r"\w[\w.-]*", config.name):
        yield Violation(f"given {config.name!r}, but it names a folder: letters, digits, '_', '-' and '.'", ("name",))


def check_device(config: "Config") -> Iterator[Violation]:
    address = config.cluster.ray_address
    if config.device == "auto" and address is not None:
        text = f"given auto, but the GPUs of this machine say nothing of the cluster at {address}; valid: cpu, cuda"
        yield Violation(text, ("device", "cluster.ray_address"))


def check_gpus_here(config: "Config") -> Iterator[Violation]:
    if config.device == "cuda" and config.cluster.ray_address is None and not sees_gpu():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "no GPU is seen here" if hidden is None else f"no GPU is seen with CUDA_VISIBLE_DEVICES={hidden!r}"
        yield Violation(f"given cuda, but {why}; device: cpu runs on gloo", ("device", "cluster.ray_address"))


def check_ray_address(config: "Config") -> Iterator[Violation]:
    address = config.cluster.ray_address
    if address is not None and address != "auto" and not re.fullmatch(r"[\w.\[\]:-]+:\d+", address):
        text = f"given {address!r}, valid: HOST:PORT of a Ray head (no ray:// client address), auto for the cluster of "
        text += "this node"
        yield Violation(text, ("cluster.ray_address",))


def check_model(config: "Config") -> Iterator[Violation]:
    paths: dict[str, tuple[str, ...]] = {"actor": ("model.path", "toy.folder")}
    paths |= {"critic": ("roles.critic.path",)} if config.roles.critic and config.roles.critic.path else {}
    for role in ("teacher", *REWARD_ROLES):
        paths |= {role: (f"roles.{role}.path",)} if getattr(config.roles, role) else {}
    shapes: dict[str, ModelShape] = {}
    for name, keys in paths.items():
        path = config.model_of(name).path
        try:
            shapes[name] = model_shape(config, path)
        except ValueError as error:  # among them the ConfigErrors of ModelShape
            yield Violation(str(error), keys)
            continue
        yield from check_model_files(config, path, keys)
        if name in REWARD_ROLES:
            yield from check_classifier(shapes[name], keys, is_served=name == "reward_server")
        elif name != "critic" and (name, config.algorithm.name) != ("actor", "reward_model"):
            yield from check_language_model(shapes[name], keys)
    model = shapes.get("actor")
    for name in config.roles.megatron:
        if shape := shapes.get(name, model if name not in paths else None):
            yield from check_role_model(config, name, shape)
    for section in config.servers:
        name = "actor" if section == "rollout" else section.removeprefix("roles.")
        if shape := shapes.get(name):
            yield from check_server_heads(config, section, shape)
            if name not in REWARD_ROLES:  # they may have tokens of their own
                yield from check_context(config, section, shape)
    if model and "critic" in shapes and shapes["critic"].vocab_size != model.vocab_size:
        text = f"has {shapes['critic'].vocab_size} tokens, but model.path has {model.vocab_size}: not the same tokens"
        yield Violation(text, ("roles.critic.path", "model.path"))


def check_model_files(config: "Config", path: str, keys: tuple[str, ...]) -> Iterator[Violation]:
    folder = Path(path)
    if is_toy_model(config, path):
        return
    if not any(folder.glob("*.safetensors")):
        yield Violation(f"no *.safetensors in {folder}", keys)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Violation(f"no tokenizer in {folder}: {' or '.join(TOKENIZER_FILES)}", keys)


def check_language_model(shape: ModelShape, keys: tuple[str, ...]) -> Iterator[Violation]:
    classifiers = [name for name in shape.hf.get("architectures") or [] if name.endswith("ForSequenceClassification")]
    if classifiers:
        text = f"config.json names {classifiers[0]}: its score head would be dropped; a language model is wanted here. "
        text += "Valid: a ...ForCausalLM, or this one as roles.critic.path, as roles.reward_model.path or with "
        text += "algorithm.name: reward_model"
        yield Violation(text, (*keys, "algorithm.name"))


def check_classifier(shape: ModelShape, keys: tuple[str, ...], is_served: bool) -> Iterator[Violation]:
    architecture = listed(shape.hf.get("architectures") or ["no architecture"])
    labels = len(shape.hf.get("id2label") or ()) or shape.hf.get("num_labels", 2)  # as transformers reads it
    if not architecture.endswith("ForSequenceClassification"):
        text = f"config.json names {architecture}, but a reward model is a sequence classifier with one score; "
        text += "algorithm.name: reward_model trains one, tools/convert_ckpt.py --to-hf exports it"
        yield Violation(text, keys)
    elif labels != 1:
        text = f"config.json has {labels} labels (id2label, num_labels), but a reward model has one score; valid: 1"
        yield Violation(text, keys)
    elif is_served and architecture not in CLASSIFIERS:
        text = f"config.json names {architecture}, and SGLang does not serve its scores; valid: {listed(CLASSIFIERS)}, "
        yield Violation(f"{text}or this one as roles.reward_model.path", keys)


def check_server_heads(config: "Config", section: str, shape: ModelShape) -> Iterator[Violation]:
    heads, groups, size = shape.num_heads, shape.num_kv_heads, config.servers[section].tensor_parallel
    width = shape.moe_ffn_hidden_size if shape.num_experts else shape.ffn_hidden_size
    # SGLang copies key/value heads where it has more ranks than those.
    valid = [ranks for ranks in divisors(gcd(heads, width)) if groups % ranks == 0 or ranks % groups == 0]
    if size not in valid:
        yield Violation(
            f"given {size}, but the model has {heads} attention heads, {groups} key/value heads "
            f"and intermediate size {width}, and it must divide the first and the last, and divide or be a multiple of "
            f"the second; valid: {listed(valid)}",
            (f"{section}.tensor_parallel", "model.path", "algorithm.name"),
        )


def check_context(config: "Config", section: str, shape: ModelShape) -> Iterator[Violation]:
    prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens
    if prompt + response > shape.max_positions:
        yield Violation(
            f"data.max_prompt_tokens + rollout.sampling.max_new_tokens = {prompt} + {response} = {prompt + response} "
            f"is more than the {'model' if section == 'rollout' else 'teacher'}'s max_position_embeddings = "
            f"{shape.max_positions}",
            ("rollout.sampling.max_new_tokens", "data.max_prompt_tokens", "model.path", "algorithm.name"),
        )


def check_optimizer(config: "Config") -> Iterator[Violation]:
    steps, alone = config.trainer.steps, config.algorithm.critic_warmup_steps
    sections = [
        (f"roles.{name}", role.optimizer, "trainer.steps", steps) for name, role in config.roles.trained.items()
    ]
    if config.roles.critic is not None and 0 < alone < steps:
        left = "trainer.steps - algorithm.critic_warmup_steps"
        sections[0] = ("roles.actor", config.roles.actor.optimizer, left, steps - alone)
    if config.warm_start.data is not None:
        sections.append(("warm_start", config.warm_start.optimizer, "warm_start.steps", config.warm_start.steps))
    for section, optimizer, steps_key, num_steps in sections:
        betas, warmup = optimizer.betas, optimizer.warmup_steps
        if not all(0 <= beta < 1 for beta in betas):
            text = f"given {list(betas)}, allowed: two numbers >= 0 and < 1"
            yield Violation(text, (f"{section}.optimizer.betas",))
        if warmup > num_steps:
            text = f"given {warmup}, but the peak would not be reached in {steps_key} = {num_steps}"
            yield Violation(text, (f"{section}.optimizer.warmup_steps", *steps_key.split(" - ")))
        elif warmup == num_steps and optimizer.schedule != "constant":
            text = f"given {warmup}, but {steps_key} = {num_steps} leaves no step for schedule: {optimizer.schedule}"
            text += " to fall in"
            yield Violation(text, (f"{section}.optimizer.warmup_steps", *steps_key.split(" - ")))
        for key in ("decay_from", "final_fraction"):
            given = getattr(optimizer, key)
            if optimizer.schedule == "constant" and given != type(optimizer).model_fields[key].default:
                text = f"given {given}, but {section}.optimizer.schedule is constant; linear and cosine fall"
                yield Violation(text, (f"{section}.optimizer.{key}", f"{section}.optimizer.schedule"))


def check_sampling(config: "Config") -> Iterator[Violation]:
    sampling = config.rollout.sampling
    if not config.servers:
        return
    reason = "the server's log-probs are those before the cut"
    if sampling.top_p < 1:
        text = f"given {sampling.top_p}, allowed for training: 1.0; {reason}"
        yield Violation(text, ("rollout.sampling.top_p", "algorithm.name"))
    if sampling.top_k != -1:
        text = f"given {sampling.top_k}, allowed for training: -1 (all); {reason}"
        yield Violation(text, ("rollout.sampling.top_k", "algorithm.name"))


def check_ports(config: "Config") -> Iterator[Violation]:
    taken: list[int] = []
    for section, servers in config.servers.items():
        ports, keys = servers.ports, (f"{section}.ports", f"{section}.servers")
        if ports is None:
            continue
        if len(ports) != servers.servers:
            yield Violation(f"{len(ports)} ports for {servers.servers} {section}.servers; one each is needed", keys)
        taken += ports
        for port in sorted({port for port in ports if taken.count(port) > 1}):
            yield Violation(f"port {port} is given {taken.count(port)} times", keys)
        for port in dict.fromkeys(ports):
            elsewhere = config.cluster.ray_address is not None and 1 <= port <= 65535  # each server looks at its node's
            if not elsewhere and (reason := why_port_unusable(port)):
                yield Violation(f"port {port} {reason}", keys)


def check_roles(config: "Config") -> Iterator[Violation]:
    for name in config.roles.megatron:
        yield from check_role(config, name)
    yield from check_transformer_impl(config)


def check_placement(config: "Config") -> Iterator[Violation]:
    if config.placement == "disaggregated" or not config.servers:
        return
    actor, critic, rollout = config.roles.actor, config.roles.critic, config.rollout
    for name, role in config.roles.trained.items():
        if role.nodes > 1:
            text = f"given {role.nodes}, but placement: colocated hands weights over inside one machine; valid: 1"
            yield Violation(text, (f"roles.{name}.nodes", "placement", "algorithm.name"))
    if critic and critic.gpus_per_node > actor.gpus_per_node:
        text = f"given {critic.gpus_per_node}, but with placement: colocated the critic shares the GPUs of the actor, "
        text += f"which has {actor.gpus_per_node}"
        keys = ("roles.critic.gpus_per_node", "roles.actor.gpus_per_node", "placement", "algorithm.name")
        yield Violation(text, keys)
    needed = rollout.servers * rollout.tensor_parallel
    if needed > actor.gpus_per_node:
        yield Violation(
            f"servers * tensor_parallel = {rollout.servers} * {rollout.tensor_parallel} = {needed}, but with "
            f"placement: colocated they share the actor's roles.actor.gpus_per_node = {actor.gpus_per_node}",
            ("rollout.servers", "rollout.tensor_parallel", "roles.actor.gpus_per_node", "placement", "algorithm.name"),
        )


def check_checksum(config: "Config") -> Iterator[Violation]:
    if config.debug.sync_checksum and config.servers and resolve_device(config) == "cpu":
        text = "given true, but SGLang's weights_checker works on GPUs only; valid with device: cpu: false"
        yield Violation(text, ("debug.sync_checksum", "device"))


def check_server_dtype(config: "Config") -> Iterator[Violation]:
    if config.model.dtype == "float32" and config.servers and resolve_device(config) == "cuda":
        text = "given float32, but SGLang's kernels take none on GPUs; valid: bfloat16, or device: cpu"
        yield Violation(text, ("model.dtype", "device", "algorithm.name"))


def check_deterministic(config: "Config") -> Iterator[Violation]:
    rollout, key = config.rollout, "rollout.deterministic"
    if "rollout" not in config.servers:
        return
    args = rollout.server_args
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):
        if args.get(name):
            text = f"given {args[name]!r}, but without seeds all samples of a group are the same; set {key}: true"
            yield Violation(text, (f"rollout.server_args.{name}", key))
    if not rollout.deterministic:
        return
    from megarl.rollout import seeds  # which loads numpy

    if resolve_device(config) == "cpu":
        text = "given true, but SGLang's batch-invariant kernels run on GPUs only; valid with device: cpu: false"
        yield Violation(text, (key, "device"))
    backends = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    allowed = dict.fromkeys(backends, seeds.ATTENTION_BACKENDS) | {"sampling_backend": ("pytorch",)}
    for name, choices in allowed.items():
        if args.get(name, choices[0]) not in choices:
            text = f"given {args[name]!r}, valid with {key}: {', '.join(choices)}"
            yield Violation(text, (f"rollout.server_args.{name}", key))
    chunk = args.get("chunked_prefill_size", -1)
    if isinstance(chunk, int) and 0 < chunk < seeds.MIN_CHUNK:
        text = f"given {chunk}, but a longer prompt would wait for ever; valid with {key}: -1, or {seeds.MIN_CHUNK} "
        yield Violation(text + "and more", ("rollout.server_args.chunked_prefill_size", key))
    with suppress(ValueError):  # which check_model tells
        vocab_size, tokens = model_shape(config, config.model.path).vocab_size, rollout.sampling.max_new_tokens
        if tokens * vocab_size > seeds.MAX_CANDIDATES:
            text = f"given {tokens}, times a vocabulary of {vocab_size} that is {tokens * vocab_size}, allowed with "
            text += f"{key}: {seeds.MAX_CANDIDATES}"
            yield Violation(text, ("rollout.sampling.max_new_tokens", key))


def check_server_args_of_all(config: "Config") -> Iterator[Violation]:
    for section, servers in config.servers.items():
        for key, text in check_server_args(servers.server_args):
            yield Violation(text, (f"{section}.server_args.{key}",))


CHECKS = (
    check_name,
    check_device,
    check_ray_address,
    check_model,
    *DATA_CHECKS,
    *CHECKPOINT_CHECKS,
    check_evaluation,
    check_roles,
    check_optimizer,
    check_sampling,
    check_ports,
    check_monitor,
    check_placement,
    check_checksum,
    check_server_dtype,
    check_deterministic,
    check_server_args_of_all,
    check_algorithm,
)


def refuse_used_run(config: "Config") -> None:
    """Raise ConfigError where another run has left metrics or checkpoints: they are never overwritten."""
    metrics = config.run_path / "metrics.jsonl"
    has_checkpoints = any((config.run_path / "checkpoints").glob("step_*"))
    if has_checkpoints or (metrics.exists() and metrics.stat().st_size):
        text = f"name: {config.run_path} holds an earlier run; go on with it (--resume auto), give this one another "
        text += "name (name=...) or remove it"
        raise ConfigError(text)


def model_shape(config: "Config", path: str) -> ModelShape:
    """Of a model folder, or of the toy model that the run will write there.

    Raises ValueError where config.json is missing, broken or of an unsupported model.
    """
    if is_toy_model(config, path):
        from megarl.data.toy import MODEL_CONFIG

        return ModelShape.from_hf(MODEL_CONFIG, where="the toy model")
    file = Path(path) / "config.json"
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


def is_toy_model(config: "Config", path: str) -> bool:
    return config.toy is not None and Path(path) == Path(config.toy.folder) / "model"
