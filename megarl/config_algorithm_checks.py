"""What the parts of an algorithm allow: keys that nobody would read, parts that exclude or need each other."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from megarl.config_role_checks import LAYOUT_KEYS
from megarl.config_violation import Violation, divisors, listed, nearest_multiples, nearest_two
from megarl.presets import GROUP_RELATIVE, PAIRS

if TYPE_CHECKING:
    from megarl.config import Config

GSPO_CLIP = 0.05
RATIO_CLIPS = ("ppo", "dual_clip", "gspo", "cispo")
# key -> (the key whose choice decides, the choices that read it); given for another choice it would be silent
READ_BY: dict[str, tuple[str, tuple[str, ...]]] = {
    "normalize_by_std": ("advantage", ("grpo",)),
    "gae": ("advantage", ("gae",)),
    "value_clip": ("advantage", ("gae",)),
    "critic_warmup_steps": ("advantage", ("gae",)),
    "clip_low": ("policy_loss", RATIO_CLIPS),
    "clip_high": ("policy_loss", RATIO_CLIPS),
    "dual_clip": ("policy_loss", ("dual_clip",)),
    "tau_positive": ("policy_loss", ("sapo",)),
    "tau_negative": ("policy_loss", ("sapo",)),
    "aggregation_length": ("loss_aggregation", ("constant",)),
    "preference": ("name", PAIRS),
}
KL_KEYS = ("kl_in", "kl_estimator", "kl_importance_weighted", "kl_target", "kl_horizon")
SUPERVISED_KEYS = ("name", "prompts_per_step", "group_size", "mini_batch_size", "preference")
IGNORES_REWARD = {  # advantages that do not read Sample.reward
    "gdpo": "gdpo reads the parts of a reward, not their sum",
    "distillation": "distillation learns from the teacher's log-probs alone",
}


def check_batch(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    prompts, group, mini = algorithm.prompts_per_step, algorithm.group_size, algorithm.mini_batch_size
    samples = prompts * group
    batch_keys = ("algorithm.mini_batch_size", "algorithm.prompts_per_step", "algorithm.group_size")
    if algorithm.is_supervised:
        wanted = 2 if algorithm.has_pairs else 1
        if group != wanted:
            text = f"given {group}, but for {algorithm.name} a row of data.train is {wanted} sample(s); valid: {wanted}"
            yield Violation(text, ("algorithm.group_size", "algorithm.name"))
        if algorithm.has_pairs and mini is not None and mini % 2:
            text = f"given {mini}, but the samples of {algorithm.name} are pairs; nearest valid: {nearest_multiples(mini, 2)}"
            yield Violation(text, ("algorithm.mini_batch_size", "algorithm.name"))
    elif group < 2 and algorithm.advantage in GROUP_RELATIVE:
        text = f"{algorithm.advantage} needs group_size >= 2, given {group}; reinforce_plus_plus does without groups"
        yield Violation(text, ("algorithm.group_size", "algorithm.advantage", "algorithm.name"))
    if mini is not None and samples % mini:
        near = nearest_multiples(prompts, mini // gcd(mini, group))
        yield Violation(
            f"given {mini}, but algorithm.prompts_per_step * algorithm.group_size = {prompts} * {group} = {samples} is "
            f"not a multiple of it; nearest valid mini_batch_size: {nearest_two(mini, divisors(samples))}; "
            f"nearest valid prompts_per_step: {near}",
            batch_keys,
        )
    for name, role in config.roles.megatron.items():
        if algorithm.samples_per_update < role.data_parallel:
            yield Violation(
                f"an update has {algorithm.samples_per_update} samples (prompts_per_step {prompts}, group_size {group}, "
                f"mini_batch_size {'null' if mini is None else mini}), fewer than the {role.data_parallel} data-parallel "
                f"ranks (roles.{name}: {role.sizes}); at least {role.data_parallel} are needed",
                batch_keys + tuple(f"roles.{name}.{key}" for key in LAYOUT_KEYS),
            )


def check_unread_keys(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    if algorithm.is_supervised:
        read = SUPERVISED_KEYS + (("loss_aggregation", "aggregation_length") if algorithm.name == "sft" else ())
        for key in type(algorithm).model_fields:
            if key not in read and not algorithm.is_default(key):
                text = f"given {_shown(algorithm, key)}, but algorithm.name: {algorithm.name} learns from the rows of data.train alone"
                yield Violation(text, (f"algorithm.{key}", "algorithm.name"))
    for key, (reader, choices) in READ_BY.items():
        used = getattr(algorithm, reader)
        if used not in choices and not algorithm.is_default(key):
            text = f"given {_shown(algorithm, key)}, but only algorithm.{reader}: {' or '.join(choices)} reads it, and that is {used}"
            yield Violation(text, (f"algorithm.{key}", f"algorithm.{reader}", "algorithm.name"))
    for key in KL_KEYS:
        if algorithm.kl_coefficient == 0 and not algorithm.is_default(key):
            text = f"given {_shown(algorithm, key)}, but algorithm.kl_coefficient is 0: there is no KL term"
            yield Violation(text, (f"algorithm.{key}", "algorithm.kl_coefficient"))


def _shown(algorithm, key: str) -> str:
    value = getattr(algorithm, key)
    return str(value.model_dump(exclude_unset=True) if hasattr(value, "model_dump") else value)


def check_policy_loss(config: "Config") -> Iterator[Violation]:
    algorithm = config.algorithm
    widest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.policy_loss == "gspo" and widest > GSPO_CLIP:
        yield Violation(
            f"given gspo with clip_low {algorithm.clip_low:g} and clip_high {algorithm.clip_high:g}, but it clips a sequence's "
            f"mean ratio, of which {widest:g} stops nothing (the paper has 3e-4 and 4e-4); at most {GSPO_CLIP:g}",
            ("algorithm.policy_loss", "algorithm.clip_low", "algorithm.clip_high"),
        )
    if algorithm.old_logprobs == "rollout" and algorithm.off_policy is not None:
        yield Violation(
            "given, but with algorithm.old_logprobs: rollout the policy's ratio is taken to the server's log-probs and nothing is "
            "left to correct; valid: null, or old_logprobs: recompute",
            ("algorithm.off_policy", "algorithm.old_logprobs"),
        )


def check_kl(config: "Config") -> Iterator[Violation]:
    algorithm, reference = config.algorithm, config.roles.reference
    enabled_keys = ("roles.reference.enabled",)
    if algorithm.kl_coefficient > 0 and not reference.enabled:
        yield Violation(
            f"given {algorithm.kl_coefficient}, but the KL term needs roles.reference.enabled: true",
            ("algorithm.kl_coefficient", *enabled_keys),
        )
    if algorithm.name in ("dpo", "ipo") and not reference.enabled:
        text = f"given false, but {algorithm.name} compares the policy with the reference; valid: true"
        yield Violation(text, (*enabled_keys, "algorithm.name"))
    if algorithm.kl_coefficient > 0 and algorithm.kl_in == "loss":
        if algorithm.kl_estimator == "k1" and not algorithm.kl_importance_weighted:
            yield Violation(
                "given k1, but in the loss its gradient is 0 in the mean; valid there: k2, k3, absolute, or k1 with "
                "algorithm.kl_importance_weighted: true; in the reward (algorithm.kl_in: reward): all",
                ("algorithm.kl_estimator", "algorithm.kl_in", "algorithm.name"),
            )
    elif algorithm.kl_importance_weighted and algorithm.kl_coefficient > 0:
        text = "given true, but algorithm.kl_in is reward: there the samples are the policy's own; valid: false"
        yield Violation(text, ("algorithm.kl_importance_weighted", "algorithm.kl_in"))
    if (algorithm.kl_target is None) != (algorithm.kl_horizon is None):
        text = f"given {algorithm.kl_target}, with algorithm.kl_horizon {algorithm.kl_horizon}: the two go together"
        yield Violation(text, ("algorithm.kl_target", "algorithm.kl_horizon"))
    elif algorithm.kl_horizon is not None and 5 * algorithm.kl_horizon <= algorithm.samples_per_step:
        yield Violation(
            f"given {algorithm.kl_horizon}, but with {algorithm.samples_per_step} samples a step (prompts_per_step * group_size) "
            f"the coefficient could fall to 0 in one; at least {algorithm.samples_per_step // 5 + 1}",
            ("algorithm.kl_horizon", "algorithm.prompts_per_step", "algorithm.group_size"),
        )
    if reference.refresh_every and (not reference.enabled or algorithm.is_supervised):
        why = f"algorithm.name: {algorithm.name} keeps its reference" if reference.enabled else "roles.reference.enabled is false"
        yield Violation(f"given {reference.refresh_every}, but {why}", ("roles.reference.refresh_every", *enabled_keys))
    if reference.ema_decay is not None and not reference.refresh_every:
        text = f"given {reference.ema_decay}, but roles.reference.refresh_every is 0: there is no refresh; valid: 1 or more there"
        yield Violation(text, ("roles.reference.ema_decay", "roles.reference.refresh_every"))


def check_reward(config: "Config") -> Iterator[Violation]:
    from megarl.rewards import REWARDS

    algorithm, reward = config.algorithm, config.algorithm.reward
    if algorithm.is_supervised:
        return
    keys = ("algorithm.reward", "algorithm.advantage", "algorithm.name")
    if reward is None and algorithm.advantage != "distillation":
        yield Violation(f"given null, but algorithm.advantage: {algorithm.advantage} is made of rewards; valid: {listed(sorted(REWARDS))}", keys)
    for name in [reward] if isinstance(reward, str) else reward or {}:
        if name not in REWARDS:
            yield Violation(f"given {name!r}, valid: {listed(sorted(REWARDS))}", ("algorithm.reward",))
    if reward == {} or (isinstance(reward, dict) and not any(reward.values())):
        yield Violation(f"given {reward}: no reward has a weight", ("algorithm.reward",))
    if algorithm.advantage == "gdpo" and not isinstance(reward, dict):
        yield Violation(f"given {reward}, but gdpo wants rewards by name with their weights: {{gsm8k: 1.0, completed: 0.1}}", keys)


def check_shaping(config: "Config") -> Iterator[Violation]:
    """What changes the rewards or chooses among them."""
    algorithm, overlong, sampling = config.algorithm, config.algorithm.overlong, config.algorithm.dynamic_sampling
    advantage_keys = ("algorithm.advantage", "algorithm.name")
    penalty = overlong is not None and overlong.penalty > 0
    kl_in_reward = algorithm.kl_coefficient > 0 and algorithm.kl_in == "reward"
    if why := IGNORES_REWARD.get(algorithm.advantage):
        changes = {"whiten_rewards": algorithm.whiten_rewards, "overlong.penalty": penalty, "kl_in": kl_in_reward}
        for key in (key for key, given in changes.items() if given):
            yield Violation(f"changes the reward, but {why}", (f"algorithm.{key}", *advantage_keys))
    if algorithm.whiten_rewards and algorithm.advantage == "grpo" and algorithm.normalize_by_std:
        text = "given true, but grpo divides by the group's standard deviation anyway: it changes nothing; valid: false"
        yield Violation(text, ("algorithm.whiten_rewards", *advantage_keys))
    if algorithm.whiten_advantages and algorithm.advantage == "reinforce_plus_plus":
        text = "given true, but reinforce_plus_plus whitens them itself; valid: false"
        yield Violation(text, ("algorithm.whiten_advantages", *advantage_keys))
    if sampling is not None and (algorithm.group_size < 2 or algorithm.advantage == "distillation"):
        why = f"group_size is {algorithm.group_size}" if algorithm.group_size < 2 else "distillation has no use for rewards"
        text = f"given, but it looks for groups with unequal rewards, and {why}; valid: null"
        yield Violation(text, ("algorithm.dynamic_sampling", "algorithm.group_size", *advantage_keys))
    if sampling is not None and (sampling.prompts_per_round or 0) > algorithm.prompts_per_step:
        text = f"given {sampling.prompts_per_round}, but a round has at most algorithm.prompts_per_step = {algorithm.prompts_per_step}: "
        text += "groups left over would wait for more than a step"
        yield Violation(text, ("algorithm.dynamic_sampling.prompts_per_round", "algorithm.prompts_per_step"))
    if overlong is not None:
        longest = config.rollout.sampling.max_new_tokens
        if overlong.buffer_tokens is not None and overlong.buffer_tokens > longest:
            text = f"given {overlong.buffer_tokens}, but it is the end of rollout.sampling.max_new_tokens = {longest}"
            yield Violation(text, ("algorithm.overlong.buffer_tokens", "rollout.sampling.max_new_tokens"))
        if not penalty and not overlong.filter:
            text = "given with penalty 0 and filter false: it does nothing; valid: null"
            yield Violation(text, ("algorithm.overlong", "algorithm.overlong.penalty", "algorithm.overlong.filter"))


def check_critic(config: "Config") -> Iterator[Violation]:
    algorithm, critic, gae = config.algorithm, config.roles.critic, config.algorithm.gae
    keys = ("roles.critic", "algorithm.advantage", "algorithm.name")
    if algorithm.advantage == "gae" and critic is None:
        text = "null, but algorithm.advantage: gae needs a critic; give roles.critic: {gpus_per_node: 1}, or an advantage without one: grpo"
        yield Violation(text, keys)
    if algorithm.advantage != "gae" and critic is not None:
        used = f"algorithm.name: {algorithm.name}" if algorithm.is_supervised else f"algorithm.advantage: {algorithm.advantage}"
        yield Violation(f"given, but {used} trains no critic; valid: null, or algorithm.name: ppo", keys)
    if gae.lam is not None and gae.length_adaptive_alpha is not None:
        text = f"given {gae.length_adaptive_alpha}, but algorithm.gae.lam is {gae.lam}: it is one or the other; set the other to null"
        yield Violation(text, ("algorithm.gae.length_adaptive_alpha", "algorithm.gae.lam"))
    if gae.lam is None and gae.length_adaptive_alpha is None:
        yield Violation("null, and so is algorithm.gae.length_adaptive_alpha: one of them is needed", ("algorithm.gae.lam",))
    if algorithm.critic_warmup_steps >= config.trainer.steps:
        text = f"given {algorithm.critic_warmup_steps}, but in trainer.steps = {config.trainer.steps} the policy would never be trained"
        yield Violation(text, ("algorithm.critic_warmup_steps", "trainer.steps"))


def check_teacher(config: "Config") -> Iterator[Violation]:
    algorithm, keys = config.algorithm, ("roles.teacher", "algorithm.advantage", "algorithm.name")
    if algorithm.advantage == "distillation" and not algorithm.is_supervised:
        if config.roles.teacher is None:
            yield Violation("null, but distillation needs a teacher; give roles.teacher: {path: FOLDER}", keys)
        if config.rollout.sampling.temperature != 1:
            yield Violation(
                f"given {config.rollout.sampling.temperature}, but the teacher's servers score at temperature 1; valid with "
                f"distillation: 1.0",
                ("rollout.sampling.temperature", *keys),
            )
    elif config.roles.teacher is not None:
        yield Violation(f"given, but algorithm.name: {algorithm.name} has no teacher; valid: null, or algorithm.name: distillation", keys)


def check_preference(config: "Config") -> Iterator[Violation]:
    algorithm, preference = config.algorithm, config.algorithm.preference
    for key, names in (("beta", ("dpo", "ipo")), ("label_smoothing", ("dpo",)), ("center", ("reward_model",))):
        given = getattr(preference, key)
        if algorithm.has_pairs and algorithm.name not in names and given != type(preference).model_fields[key].default:
            text = f"given {given}, but only algorithm.name: {' or '.join(names)} reads it, and that is {algorithm.name}"
            yield Violation(text, (f"algorithm.preference.{key}", "algorithm.name"))


def check_supervised(config: "Config") -> Iterator[Violation]:
    """What only a run with servers and rewards has."""
    algorithm = config.algorithm
    if not algorithm.is_supervised:
        return
    given = {
        "placement": config.placement == "colocated",
        "debug.sync_checksum": config.debug.sync_checksum,
        "debug.shuffle_rewards": config.debug.shuffle_rewards,
        "warm_start.data": config.warm_start.data is not None,
    }
    for key in (key for key, is_given in given.items() if is_given):
        yield Violation(f"given, but algorithm.name: {algorithm.name} has no servers, rewards or warm start", (key, "algorithm.name"))


ALGORITHM_CHECKS = (
    check_batch,
    check_unread_keys,
    check_policy_loss,
    check_kl,
    check_reward,
    check_shaping,
    check_critic,
    check_teacher,
    check_preference,
    check_supervised,
)
