"""What a config comes to: the whole tree, the active parts of its algorithm, and the numbers that result from it."""

from typing import TYPE_CHECKING

from megarl.config_algorithm import AlgorithmConfig
from megarl.config_file import dump
from megarl.config_rewards import RewardConfig
from megarl.config_section import changed_keys
from megarl.machine import resolve_device
from megarl.memory_plan import memory_lines
from megarl.presets import WITH_REFERENCE

if TYPE_CHECKING:
    from megarl.config import Config

# Keys of the algorithm that no preset means to decide: they are the task's.
OF_THE_TASK = ("prompts_per_step", "group_size", "mini_batch_size", "epochs", "reward")


def describe(config: "Config") -> str:
    """The resolved config as YAML that `load` reads back, then its algorithm's parts and its numbers as comments."""
    algorithm, actor = config.algorithm, config.roles.actor
    device = resolve_device(config)
    per_row = f"{algorithm.prompts_per_step} {'rows' if algorithm.is_supervised else 'prompts'}"
    updates = algorithm.samples_per_step // algorithm.samples_per_update * algorithm.epochs
    lines = [f"{name:19} {text}" for name, text in active_parts(config).items()]
    lines += [
        "",
        f"device              {device}",
        f"data parallel size  {actor.data_parallel} ({actor.sizes})",
        f"samples per step    {algorithm.samples_per_step} ({per_row} x {algorithm.group_size})",
        f"updates per step    {updates} (of {algorithm.samples_per_update} samples)",
    ]
    if config.servers:
        sequence = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
        what = "round" if algorithm.dynamic_sampling else "step "
        tokens = config.prompts_per_round * algorithm.group_size * sequence
        lines += [f"tokens per {what}    at most {tokens:,} ({sequence:,} per sample)"]
    lines += ["", "role           layout            GPUs   CPUs"]
    rows = needs(config, int(device == "cuda"))
    lines += [f"{name:14} {layout:16} {gpus:5} {cpus:6g}" for name, layout, gpus, cpus in rows]
    if device == "cuda":
        lines += ["", *memory_lines(config)]
    return dump(config.model_dump(mode="json")) + "\n".join(f"# {line}".rstrip() for line in lines) + "\n"


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
        layout = f"{group.servers} x {group.tensor_parallel} ranks"
        rows.append((section.removeprefix("roles."), layout, gpus, group.servers * group.cpus_per_server))
    return [*rows, ("needed", "", sum(row[2] for row in rows), sum(row[3] for row in rows))]


def active_parts(config: "Config") -> dict[str, str]:
    """What the algorithm does, part by part; parts that are off are left out."""
    algorithm = config.algorithm
    parts = {"algorithm": _name(algorithm)}
    if algorithm.is_supervised:
        parts["loss"] = _supervised_loss(config)
        return parts | ({"reference": "the model it starts from"} if algorithm.name in WITH_REFERENCE else {})
    if (start := config.warm_start).data is not None:
        parts["warm start"] = f"{start.steps} steps of {start.batch_size} rows of {start.data}"
    if algorithm.reward:
        parts["reward"] = " + ".join(_reward(name, part) for name, part in algorithm.reward.items())
        parts["reward"] += ", only logged" * (algorithm.advantage == "distillation")
    if config.debug.shuffle_rewards:
        parts["control"] = "rewards are shuffled: nothing must be learnt"
    if (sampling := algorithm.dynamic_sampling) is not None:
        parts["dynamic sampling"] = f"at most {sampling.max_rounds} rounds of {config.prompts_per_round} prompts"
    if algorithm.overlong is not None:
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
        clip = "" if algorithm.value_clip is None else f"value clip {algorithm.value_clip:g}, "
        alone = f"alone for {algorithm.critic_warmup_steps} steps, " * (algorithm.critic_warmup_steps > 0)
        parts["critic"] = f"{clip}{alone}from {config.model_of('critic').path}"
    if config.roles.teacher is not None:
        parts["teacher"] = config.roles.teacher.path
    for role in ("reward_model", "reward_server"):
        if getattr(config.roles, role) is not None:
            parts["reward model"] = config.model_of(role).path + ", by SGLang" * (role == "reward_server")
    if (reference := config.roles.reference).enabled:
        parts["reference"] = "the policy before RL"
        if reference.refresh_every:
            kept = "" if reference.ema_decay is None else f", averaged with decay {reference.ema_decay:g}"
            parts["reference"] = f"the policy, every {reference.refresh_every} steps{kept}"
        parts["reference"] += ", only logged" * (algorithm.kl_coefficient == 0)
    return parts


def _name(algorithm: AlgorithmConfig) -> str:
    """The preset, and which keys are not as it has them."""
    keys = dict.fromkeys(key.partition(".")[0] for key, _, _ in changed_keys(algorithm, algorithm.preset))
    changed = [key for key in keys if key not in OF_THE_TASK]
    return algorithm.name + (f", but for {', '.join(changed)}" if changed else "")


def _supervised_loss(config: "Config") -> str:
    preference, smoothing = config.algorithm.preference, config.algorithm.preference.label_smoothing
    return {
        "sft": f"negative log-likelihood, {_aggregation(config)}",
        "dpo": f"dpo, beta {preference.beta:g}" + f", label smoothing {smoothing:g}" * (smoothing > 0),
        "ipo": f"ipo, beta {preference.beta:g}",
        "reward_model": "Bradley-Terry" + f", center {preference.center:g}" * (preference.center > 0),
    }[config.algorithm.name]


def _reward(name: str, part: RewardConfig) -> str:
    text = f"{part.weight:g} {name}" if part.weight != 1 else name
    return text + f" ({part.normalize})" * (part.normalize != "none")


def _overlong(config: "Config") -> str:
    overlong = config.algorithm.overlong
    assert overlong is not None, "algorithm.overlong is null"
    texts = []
    if overlong.penalty > 0:
        texts.append(f"penalty up to {overlong.penalty:g} over the last {config.overlong_buffer_tokens} tokens")
    return ", ".join(texts + ["truncated responses are not trained on"] * overlong.filter)


def _advantage(algorithm: AlgorithmConfig) -> str:
    text: str = algorithm.advantage
    gae = algorithm.gae
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
    text = f"{algorithm.kl_coefficient:g} {algorithm.kl_estimator} in the {algorithm.kl_in}"
    text += ", importance-weighted" * algorithm.kl_importance_weighted
    if algorithm.kl_target is not None:
        text += f", adapted to {algorithm.kl_target:g} nats per token over {algorithm.kl_horizon} samples"
    return text
