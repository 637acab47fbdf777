"""What a config comes to: the whole tree, the active parts of its algorithm, and the numbers that result from it."""

from typing import TYPE_CHECKING

import yaml

from megarl.config_algorithm import AlgorithmConfig
from megarl.machine import resolve_device

if TYPE_CHECKING:
    from megarl.config import Config

LABELS = {"rollout": "rollout", "roles.teacher": "teacher"}


def describe(config: "Config") -> str:
    """The resolved config as YAML that `load` reads back, followed by its algorithm's parts and its numbers as comments."""
    algorithm, actor = config.algorithm, config.roles.actor
    device = resolve_device(config)
    per_row = f"{algorithm.prompts_per_step} {'rows' if algorithm.is_supervised else 'prompts'} x {algorithm.group_size}"
    updates = algorithm.samples_per_step // algorithm.samples_per_update * algorithm.epochs
    lines = [f"{name:19} {text}" for name, text in active_parts(config).items()]
    lines += [
        "",
        f"device              {device}",
        f"data parallel size  {actor.data_parallel} ({actor.sizes})",
        f"samples per step    {algorithm.samples_per_step} ({per_row})",
        f"updates per step    {updates} (of {algorithm.samples_per_update} samples)",
    ]
    if config.servers:
        sequence = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
        lines += [f"tokens per step     at most {algorithm.samples_per_step * sequence:,} ({sequence:,} per sample)"]
    lines += ["", "role      layout            GPUs   CPUs"]
    lines += [f"{name:9} {layout:16} {gpus:5} {cpus:6g}" for name, layout, gpus, cpus in needs(config, int(device == "cuda"))]
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    return text + "\n".join(f"# {line}".rstrip() for line in lines) + "\n"


def needs(config: "Config", gpus_per_rank: int) -> list[tuple[str, str, int, float]]:
    """(role, layout, GPUs, CPUs) of each role, and the sums."""
    device = "cuda" if gpus_per_rank else "cpu"
    rows = []
    for name, role in config.roles.megatron.items():
        cpus = role.world_size * role.rank_cpus(device)
        gpus = 0 if name == "critic" and config.placement == "colocated" else role.world_size * gpus_per_rank
        rows.append((name, f"{role.nodes} x {role.gpus_per_node} ranks", gpus, cpus))
    for section, group in config.servers.items():
        shares = section == "rollout" and config.placement == "colocated"
        gpus = 0 if shares else group.servers * group.tensor_parallel * gpus_per_rank
        rows.append((LABELS[section], f"{group.servers} x {group.tensor_parallel} ranks", gpus, group.servers * group.cpus_per_server))
    return [*rows, ("needed", "", sum(row[2] for row in rows), sum(row[3] for row in rows))]


def active_parts(config: "Config") -> dict[str, str]:
    """What the algorithm does, part by part; parts that are off are left out."""
    algorithm = config.algorithm
    parts = {"algorithm": algorithm.name}
    if algorithm.is_supervised:
        return parts | {"loss": _supervised_loss(algorithm)}
    if algorithm.reward is not None:
        parts["reward"] = " + ".join(f"{w:g} {n}" for n, w in (algorithm.reward_weights or {}).items()) or algorithm.reward
    if (sampling := algorithm.dynamic_sampling) is not None:
        size = sampling.prompts_per_round or algorithm.prompts_per_step
        parts["dynamic sampling"] = f"at most {sampling.max_rounds} rounds of {size} prompts"
    if (overlong := algorithm.overlong) is not None:
        parts["overlong"] = _overlong(config)
    if algorithm.whiten_rewards:
        parts["rewards"] = "whitened over the step"
    parts["advantage"] = _advantage(algorithm)
    parts["policy loss"] = _policy_loss(algorithm) + f", {_aggregation(config)}"
    parts["old log-probs"] = {"recompute": "the trainer's", "rollout": "the server's"}[algorithm.old_logprobs]
    if (off_policy := algorithm.off_policy) is not None:
        veto = "" if off_policy.veto is None else f", veto below {off_policy.veto:g}"
        parts["off-policy"] = f"{off_policy.kind} within [{off_policy.low:g}, {off_policy.high:g}]{veto}"
    if algorithm.kl_coefficient > 0:
        parts["KL"] = _kl(algorithm)
    if algorithm.entropy_coefficient > 0:
        parts["entropy bonus"] = f"{algorithm.entropy_coefficient:g}"
    if algorithm.advantage == "gae":
        clip = "no clip" if algorithm.value_clip is None else f"clip {algorithm.value_clip:g}"
        parts["critic"] = f"value loss with {clip}, alone for {algorithm.critic_warmup_steps} steps, from {config.model_of('critic').path}"
    if config.roles.teacher is not None:
        parts["teacher"] = config.roles.teacher.path
    if (reference := config.roles.reference).enabled:
        parts["reference"] = "the policy before RL"
        if reference.refresh_every:
            kept = "" if reference.ema_decay is None else f", averaged with decay {reference.ema_decay:g}"
            parts["reference"] = f"the policy, every {reference.refresh_every} steps{kept}"
    return parts


def _supervised_loss(algorithm: AlgorithmConfig) -> str:
    preference = algorithm.preference
    return {
        "sft": f"negative log-likelihood, {algorithm.loss_aggregation}",
        "dpo": f"dpo, beta {preference.beta:g}, label smoothing {preference.label_smoothing:g}",
        "ipo": f"ipo, beta {preference.beta:g}",
        "reward_model": f"Bradley-Terry, center {preference.center:g}",
    }[algorithm.name]


def _overlong(config: "Config") -> str:
    overlong = config.algorithm.overlong
    texts = []
    if overlong.penalty > 0:
        texts.append(f"penalty up to {overlong.penalty:g} over the last {config.overlong_buffer_tokens} tokens")
    return ", ".join(texts + ["truncated responses are not trained on"] * overlong.filter)


def _advantage(algorithm: AlgorithmConfig) -> str:
    text, gae = algorithm.advantage, algorithm.gae
    if text == "grpo":
        text += f", {'divided by' if algorithm.normalize_by_std else 'without'} the group's std"
    if text == "gae":
        lam = f"lambda {gae.lam:g}" if gae.lam is not None else f"lambda 1 - 1 / ({gae.length_adaptive_alpha:g} length)"
        targets = "" if gae.returns_lam is None else f", targets with lambda {gae.returns_lam:g}"
        text += f", gamma {gae.gamma:g}, {lam}{targets}"
    return text + ", whitened over the step" * algorithm.whiten_advantages


def _policy_loss(algorithm: AlgorithmConfig) -> str:
    if algorithm.policy_loss == "sapo":
        return f"sapo, tau {algorithm.tau_positive:g} and {algorithm.tau_negative:g}"
    text = f"{algorithm.policy_loss}, clip {algorithm.clip_low:g} below and {algorithm.clip_high:g} above"
    return text + f", dual clip {algorithm.dual_clip:g}" * (algorithm.policy_loss == "dual_clip")


def _aggregation(config: "Config") -> str:
    algorithm = config.algorithm
    length = f" of {config.aggregation_length} tokens" if algorithm.loss_aggregation == "constant" else ""
    return algorithm.loss_aggregation + length


def _kl(algorithm: AlgorithmConfig) -> str:
    weighted = ", importance-weighted" * algorithm.kl_importance_weighted
    target = "" if algorithm.kl_target is None else f", adapted to {algorithm.kl_target:g} nats per token over {algorithm.kl_horizon} samples"
    return f"{algorithm.kl_coefficient:g} {algorithm.kl_estimator} in the {algorithm.kl_in}{weighted}{target}"
