"""What the parts of an algorithm on rewards or on a teacher allow: parts that exclude or need each other."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config_guard_checks import check_guards
from megarl.config_reward_checks import IGNORES_REWARD, REWARD_CHECKS
from megarl.config_unread import Unread, unread
from megarl.config_violation import Violation
from megarl.presets import GROUP_RELATIVE, PAIRS, PRESETS, USUAL_CLIPS

if TYPE_CHECKING:
    from megarl.config import Config

GSPO_CLIP = 0.05
GEOMETRIC_HIGH = 1.1
# key -> (the key whose choice decides, the choices that read it); given for another choice it would be silent
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "normalize_by_std": ("advantage", ("grpo",)),
    "gae": ("advantage", ("gae",)),
    "value_clip": ("advantage", ("gae",)),
    "critic_warmup_steps": ("advantage", ("gae",)),
    "clip_low": ("policy_loss", tuple(USUAL_CLIPS)),
    "clip_high": ("policy_loss", tuple(USUAL_CLIPS)),
    "dual_clip": ("policy_loss", ("dual_clip",)),
    "tau_positive": ("policy_loss", ("sapo",)),
    "tau_negative": ("policy_loss", ("sapo",)),
    "aggregation_length": ("loss_aggregation", ("constant",)),
    "preference": ("name", PAIRS),
}
KL_KEYS = ("kl_in", "kl_estimator", "kl_importance_weighted", "kl_target", "kl_horizon")


def check_unread(config: "Config") -> Iterator[Violation]:
    yield from unread(config, _reasons(config))


def _reasons(config: "Config") -> Unread:
    algorithm = config.algorithm
    reasons: Unread = {}
    for key, (reader, choices) in READ_BY.items():
        if (used := getattr(algorithm, reader)) not in choices:
            why = f"only algorithm.{reader}: {' or '.join(choices)} reads it, and that is {used}"
            reasons[f"algorithm.{key}"] = (why, f"algorithm.{reader}")
    if algorithm.kl_coefficient == 0:
        why = "algorithm.kl_coefficient is 0: there is no KL term"
        reasons |= {f"algorithm.{key}": (why, "algorithm.kl_coefficient") for key in KL_KEYS}
    if algorithm.old_logprobs == "rollout":
        why = "with algorithm.old_logprobs: rollout the trainer scores nothing that it could compare"
        reasons["rollout.logprob_diff_limit"] = (why, "algorithm.old_logprobs")
    for key in ("chosen_key", "rejected_key"):
        reasons[f"data.{key}"] = (f"only algorithm.name: {' or '.join(PAIRS)} reads it", "algorithm.name")
    if config.warm_start.data is None:
        reasons["warm_start"] = ("warm_start.data is null: there is no warm start", "warm_start.data")
        reasons["data.response_key"] = ("only warm_start.data and algorithm.name: sft read it", "warm_start.data")
    return reasons


def check_groups(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.group_size < 2 and algorithm.advantage in GROUP_RELATIVE:
        text = f"{algorithm.advantage} needs group_size >= 2, given {algorithm.group_size}; reinforce_plus_plus does "
        yield Violation(text + "without groups", ("algorithm.group_size", "algorithm.advantage"))


def check_policy_loss(config: "Config") -> Iterator[Violation]:
    algorithm, preset = config.algorithm, config.algorithm.preset
    loss, clips = algorithm.policy_loss, (algorithm.clip_low, algorithm.clip_high)
    given = f"given {loss} with clip_low {clips[0]:g} and clip_high {clips[1]:g}, but "
    keys = ("algorithm.policy_loss", "algorithm.clip_low", "algorithm.clip_high")
    if loss == "gspo" and max(clips) > GSPO_CLIP:
        yield Violation(
            f"{given}it clips a sequence's mean ratio, of which {max(clips):g} stops nothing (the paper has 3e-4 and "
            f"4e-4); at most {GSPO_CLIP:g}",
            keys,
        )
    elif clips == (preset.clip_low, preset.clip_high) and loss in USUAL_CLIPS:
        usual, meant_for = USUAL_CLIPS[loss], USUAL_CLIPS.get(preset.policy_loss)
        if usual != meant_for and clips != USUAL_CLIPS["ppo"]:  # those are the schema's
            yield Violation(
                f"{given}these are the clips of algorithm.name: {algorithm.name} for {preset.policy_loss}; usual for "
                f"{loss}: clip_low {usual[0]:g}, clip_high {usual[1]:g}",
                keys,
            )


def check_off_policy(config: "Config") -> Iterator[Violation]:
    algorithm, off_policy = config.algorithm, config.algorithm.off_policy
    if off_policy is None:
        return
    if algorithm.old_logprobs == "rollout":
        yield Violation(
            "given, but with algorithm.old_logprobs: rollout the policy's ratio is taken to the server's log-probs and "
            "nothing is left to correct; valid: null, or old_logprobs: recompute",
            ("algorithm.off_policy", "algorithm.old_logprobs"),
        )
    if off_policy.kind == "icepop" and off_policy.low == 0:
        text = "0, but icepop is a band with two sides; usual: low 0.5 with high 2 to 5; token_mis can have one side"
        yield Violation(text, ("algorithm.off_policy.low", "algorithm.off_policy.kind", "algorithm.off_policy"))
    if off_policy.kind == "geometric" and off_policy.high > GEOMETRIC_HIGH:
        text = f"{off_policy.high:g}, but geometric compares a sequence's mean ratio, which hardly leaves 1: that "
        text += f"rejects nothing; at most {GEOMETRIC_HIGH:g}, usual: low 0.99 with high 1.01"
        yield Violation(text, ("algorithm.off_policy.high", "algorithm.off_policy.kind", "algorithm.off_policy"))


def check_kl(config: "Config") -> Iterator[Violation]:
    algorithm, reference = config.algorithm, config.roles.reference
    if algorithm.kl_coefficient == 0:
        return
    if not reference.enabled:
        text = f"given {algorithm.kl_coefficient}, but the KL term needs roles.reference.enabled: true"
        yield Violation(text, ("algorithm.kl_coefficient", "roles.reference.enabled"))
    if algorithm.kl_in == "loss":
        if algorithm.kl_estimator == "k1" and not algorithm.kl_importance_weighted:
            yield Violation(
                "given k1, but in the loss its gradient is 0 in the mean; valid there: k2, k3, absolute, or k1 with "
                "algorithm.kl_importance_weighted: true; in the reward (algorithm.kl_in: reward): all",
                ("algorithm.kl_estimator", "algorithm.kl_in"),
            )
    elif algorithm.kl_importance_weighted:
        text = "given true, but algorithm.kl_in is reward: there the samples are the policy's own; valid: false"
        yield Violation(text, ("algorithm.kl_importance_weighted", "algorithm.kl_in"))
    target, horizon = algorithm.kl_target, algorithm.kl_horizon
    if (target is None) != (horizon is None):
        given, other = ("kl_target", "kl_horizon") if horizon is None else ("kl_horizon", "kl_target")
        text = f"given {getattr(algorithm, given)}, but algorithm.{other} is null: give both, or set both to null"
        yield Violation(text, (f"algorithm.{given}", f"algorithm.{other}"))
    elif horizon is not None and 5 * horizon <= algorithm.samples_per_step:
        yield Violation(
            f"given {horizon}, but with {algorithm.samples_per_step} samples a step (prompts_per_step * group_size) "
            f"the coefficient could fall to 0 in one; at least {algorithm.samples_per_step // 5 + 1}",
            ("algorithm.kl_horizon", "algorithm.prompts_per_step", "algorithm.group_size"),
        )


def check_reference(config: "Config") -> Iterator[Violation]:
    reference, steps = config.roles.reference, config.trainer.steps
    key = "roles.reference.refresh_every"
    if reference.refresh_every and not reference.enabled:
        text = f"given {reference.refresh_every}, but roles.reference.enabled is false; valid: 0, or enabled: true"
        yield Violation(text, (key, "roles.reference.enabled"))
    elif reference.refresh_every > steps:
        text = f"given {reference.refresh_every}, but trainer.steps is {steps}; valid: 0 (never), or 1 to {steps}"
        yield Violation(text, (key, "trainer.steps"))
    if reference.ema_decay is not None and not reference.refresh_every:
        text = f"given {reference.ema_decay}, but {key} is 0: there is no refresh; valid: null, or 1 or more there"
        yield Violation(text, ("roles.reference.ema_decay", key))


def check_shaping(config: "Config") -> Iterator[Violation]:
    """What changes the rewards or the advantages."""
    algorithm, overlong = config.algorithm, config.algorithm.overlong
    advantage = algorithm.advantage
    has_penalty = overlong is not None and overlong.penalty > 0
    kl_in_reward = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward"
    if why := IGNORES_REWARD.get(advantage):
        changes = {
            "whiten_rewards": (algorithm.whiten_rewards, "false"),
            "overlong.penalty": (has_penalty, "0"),
            "kl_in": (kl_in_reward, "loss"),
        }
        for key, valid in ((key, valid) for key, (is_given, valid) in changes.items() if is_given):
            text = f"changes the reward, but {why}; valid: {valid}"
            yield Violation(text, (f"algorithm.{key}", "algorithm.advantage"))
    elif algorithm.whiten_rewards and not kl_in_reward:
        divides = advantage in ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
        if divides or (advantage == "grpo" and algorithm.normalize_by_std):
            text = f"given true, but {advantage} divides by a standard deviation itself: it changes nothing; valid: "
            text += "false, or a KL term in the reward"
            yield Violation(text, ("algorithm.whiten_rewards", "algorithm.advantage"))
    if algorithm.whiten_advantages and advantage == "reinforce_plus_plus":
        text = "given true, but reinforce_plus_plus whitens them itself; valid: false"
        yield Violation(text, ("algorithm.whiten_advantages", "algorithm.advantage"))


def check_dynamic_sampling(config: "Config") -> Iterator[Violation]:
    algorithm, sampling = config.algorithm, config.algorithm.dynamic_sampling
    if sampling is None:
        return
    if algorithm.group_size < 2 or algorithm.advantage == "distillation":
        alone = f"group_size is {algorithm.group_size}"
        why = alone if algorithm.group_size < 2 else "distillation has no use for rewards"
        text = f"given, but it looks for groups with unequal rewards, and {why}; valid: null"
        yield Violation(text, ("algorithm.dynamic_sampling", "algorithm.group_size", "algorithm.advantage"))
    given, most = sampling.prompts_per_round or 0, algorithm.prompts_per_step
    if given > most:
        text = f"given {given}, but a round has at most algorithm.prompts_per_step = {most}: groups left over would "
        text += f"wait for more than a step; valid: null, or 1 to {most}"
        yield Violation(text, ("algorithm.dynamic_sampling.prompts_per_round", "algorithm.prompts_per_step"))


def check_overlong(config: "Config") -> Iterator[Violation]:
    overlong, longest = config.algorithm.overlong, config.rollout.sampling.max_new_tokens
    if overlong is None:
        return
    buffer, keys = overlong.buffer_tokens, ("algorithm.overlong.buffer_tokens", "algorithm.overlong.penalty")
    if overlong.penalty == 0 and not overlong.filter:
        text = "given with penalty 0 and filter false: it does nothing; valid: null"
        yield Violation(text, ("algorithm.overlong", "algorithm.overlong.penalty", "algorithm.overlong.filter"))
    elif overlong.penalty == 0 and buffer is not None:
        yield Violation(f"given {buffer}, but algorithm.overlong.penalty is 0; valid: null, or a penalty above 0", keys)
    elif buffer is not None and buffer > longest:
        text = f"given {buffer}, but it is the end of rollout.sampling.max_new_tokens = {longest}; at most {longest}"
        yield Violation(text, (*keys, "rollout.sampling.max_new_tokens"))


def check_critic(config: "Config") -> Iterator[Violation]:
    algorithm, critic, gae = config.algorithm, config.roles.critic, config.algorithm.gae
    keys, steps = ("roles.critic", "algorithm.advantage"), config.trainer.steps
    if algorithm.advantage == "gae" and critic is None:
        text = "null, but algorithm.advantage: gae needs a critic; give roles.critic: {gpus_per_node: 1}, or an "
        yield Violation(text + "advantage without one: grpo", keys)
    if algorithm.advantage != "gae" and critic is not None:
        text = f"given, but algorithm.advantage: {algorithm.advantage} trains no critic; valid: null, or "
        yield Violation(text + _how_to_get(config, "ppo"), keys)
    if gae.lam is not None and gae.length_adaptive_alpha is not None:
        text = f"given {gae.length_adaptive_alpha}, but algorithm.gae.lam is {gae.lam}: it is one or the other; set "
        yield Violation(text + "the other to null", ("algorithm.gae.length_adaptive_alpha", "algorithm.gae.lam"))
    if gae.lam is None and gae.length_adaptive_alpha is None:
        text = "null, and so is algorithm.gae.length_adaptive_alpha: one of them is needed; usual: lam 0.95"
        yield Violation(text, ("algorithm.gae.lam",))
    if algorithm.critic_warmup_steps >= steps:
        text = f"given {algorithm.critic_warmup_steps}, but in trainer.steps = {steps} the policy would never be "
        yield Violation(f"{text}trained; at most {steps - 1}", ("algorithm.critic_warmup_steps", "trainer.steps"))


def check_teacher(config: "Config") -> Iterator[Violation]:
    algorithm, keys = config.algorithm, ("roles.teacher", "algorithm.advantage")
    temperature = config.rollout.sampling.temperature
    if algorithm.advantage != "distillation":
        if config.roles.teacher is not None:
            text = f"given, but algorithm.advantage: {algorithm.advantage} has no teacher; valid: null, or "
            yield Violation(text + _how_to_get(config, "distillation"), keys)
        return
    if config.roles.teacher is None:
        yield Violation("null, but distillation needs a teacher; give roles.teacher: {path: FOLDER}", keys)
    if temperature != 1:
        text = f"given {temperature}, but the teacher's servers score at temperature 1; valid with distillation: 1.0"
        yield Violation(text, ("rollout.sampling.temperature", *keys))


def _how_to_get(config: "Config", name: str) -> str:
    """The choice that has the advantage of this preset: the preset, or where that is chosen already its advantage."""
    chosen = config.algorithm.name == name
    return f"algorithm.advantage: {PRESETS[name]['advantage']}" if chosen else f"algorithm.name: {name}"


RL_CHECKS = (
    check_unread,
    check_groups,
    check_policy_loss,
    check_off_policy,
    check_kl,
    check_reference,
    *REWARD_CHECKS,
    check_guards,
    check_shaping,
    check_dynamic_sampling,
    check_overlong,
    check_critic,
    check_teacher,
)
