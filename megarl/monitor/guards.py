"""Guards: what usually goes wrong in RL, seen in the metrics of a run while it trains.

A guard is a function of its section of the config, the metrics of a step and what it remembers of earlier ones. It
returns what is wrong, with the usual causes and what to try; "" where nothing is; None where these metrics do not say.
A new one is such a function, a line in GUARDS and its section in megarl/config_guards.py.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from megarl.config_guards import (
    ConstantRewardConfig,
    DuplicatesConfig,
    EntropyConfig,
    GradNormConfig,
    GuardConfig,
    GuardsConfig,
    KLGuardConfig,
    MismatchConfig,
    RewardHackingConfig,
    ShortResponsesConfig,
    TruncatedConfig,
)

Metrics = Mapping[str, float]  # a line of metrics.jsonl
Memory = dict[str, list[float]]
MIN_HISTORY = 10  # values before a median means something


@dataclass(frozen=True)
class Alarm:
    guard: str  # key of GUARDS
    step: int
    action: str  # "warn" or "stop"
    text: str


@dataclass
class Watch:
    """The state of one guard."""

    num_bad: int = 0  # times in a row that it found something wrong
    alarmed_at: int | None = None  # step of the last alarm since things went wrong
    memory: Memory = field(default_factory=dict)


class Guards:
    """Raises an alarm when a guard has found something wrong for its `patience`, and again every `repeat_every` steps
    while that lasts."""

    def __init__(self, config: GuardsConfig):
        self.config = config
        self.watches: dict[str, Watch] = {}

    def check(self, metrics: Metrics) -> list[Alarm]:
        """Once per step and once per validation, with `step` and all other metrics of it."""
        alarms, step = [], int(metrics["step"])
        for name, (needs, guard) in GUARDS.items():
            config: GuardConfig = getattr(self.config, name)
            if config.action == "off" or not metrics.keys() >= needs:
                continue
            watch = self.watches.setdefault(name, Watch())
            problem = guard(config, metrics, watch.memory)
            if problem is not None and self._is_due(watch, bool(problem), config.patience, step):
                where = f"guards.{name}, step {step}"
                in_a_row = f", {watch.num_bad} times in a row" if watch.num_bad > 1 else ""
                alarms.append(Alarm(name, step, config.action, f"{where}{in_a_row}: {problem}"))
        return alarms

    def _is_due(self, watch: Watch, is_bad: bool, patience: int, step: int) -> bool:
        if not is_bad:
            watch.num_bad, watch.alarmed_at = 0, None
            return False
        watch.num_bad += 1
        lately = watch.alarmed_at is not None and step - watch.alarmed_at < self.config.repeat_every
        if watch.num_bad < patience or lately:
            return False
        watch.alarmed_at = step
        return True

    def state_dict(self) -> dict[str, dict]:
        """For JSON; only guards that have a state."""
        return {name: asdict(watch) for name, watch in self.watches.items() if watch != Watch()}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        self.watches = {name: Watch(**copy.deepcopy(watch)) for name, watch in state.items()}


def constant_reward(config: ConstantRewardConfig, metrics: Metrics, memory: Memory) -> str:
    """With one response per prompt the step is the group."""
    if "distillation/reverse_kl" in metrics:  # nothing is made of the reward
        return ""
    ratio = metrics.get("group/zero_std_ratio", float(metrics["reward/std"] == 0))
    if ratio < config.limit:
        return ""
    return (
        f"the rewards are equal within {ratio:.0%} of the groups (guards.constant_reward.limit: {config.limit:g}), at "
        f"a mean of {metrics['reward/mean']:.3g}: nothing tells good responses from bad ones. Usual causes: prompts "
        f"too hard or too easy for the model, a reward that does not find the answers in their form, a wrong "
        f"data.answer_key, a task that is solved. Read samples.jsonl; try a warm start, other data, "
        f"algorithm.dynamic_sampling, or a reward with steps between its lowest and its highest value"
    )


def kl(config: KLGuardConfig, metrics: Metrics, memory: Memory) -> str:
    """A band around the distance to the reference."""
    value = metrics["kl/ref"]
    if config.high is not None and value > config.high:
        return (
            f"kl/ref is {value:.3g} nats per token (guards.kl.high: {config.high:g}): the policy has left its "
            f"reference. Usual causes: too high a learning rate, too many updates per step, a weak KL term, a reward "
            f"that pays for unusual text. Read samples.jsonl; try a lower roles.actor.optimizer.learning_rate, "
            f"algorithm.kl_target, a higher algorithm.kl_coefficient"
        )
    if config.low is not None and value < config.low:
        return (
            f"kl/ref is {value:.3g} nats per token (guards.kl.low: {config.low:g}): the policy stays where it was. "
            f"Usual causes: too low a learning rate, too strong a KL term, groups of equal rewards, too narrow a clip. "
            f"Look at group/zero_std_ratio and clip/ratio; try a higher roles.actor.optimizer.learning_rate, a lower "
            f"algorithm.kl_coefficient"
        )
    return ""


def entropy(config: EntropyConfig, metrics: Metrics, memory: Memory) -> str:
    """Against a bound, and against what it was at first."""
    value, first = metrics["entropy"], memory.setdefault("first", [])
    if len(first) < MIN_HISTORY:
        first.append(value)
    bounds = {}
    if config.low is not None:
        bounds[f"guards.entropy.low: {config.low:g}"] = config.low
    if config.share is not None and len(first) == MIN_HISTORY:
        bound = config.share * median(first)
        bounds[f"{bound:.3g} (guards.entropy.share: {config.share:g}, of {median(first):.3g} at first)"] = bound
    below = [name for name, bound in bounds.items() if value < bound]
    if not below:
        return ""
    return (
        f"entropy is {value:.3g} nats per token, below {' and '.join(below)}: the policy has one response per prompt "
        f"and explores no others, which is right only where the task is solved. Usual causes: too high a learning "
        f"rate, many steps on few prompts, a clip that keeps unlikely tokens down. Try a higher algorithm.clip_high, "
        f"algorithm.entropy_coefficient, algorithm.kl_coefficient, a lower roles.actor.optimizer.learning_rate, more "
        f"prompts"
    )


def short_responses(config: ShortResponsesConfig, metrics: Metrics, memory: Memory) -> str:
    length = metrics["response/length_mean"]
    usual = _running_median(memory, length, config.window)
    if usual is None or length >= config.share * usual:
        return ""
    return (
        f"response/length_mean is {length:.4g} tokens, below {config.share * usual:.4g} (guards.short_responses.share: "
        f"{config.share:g}, of a running median of {usual:.4g}): responses are suddenly short. Usual causes: a reward "
        f"that pays for no answer at all, a penalty on length that outweighs the task, weights that broke in an "
        f"update; it is harmless where a model has just learnt to end its turn. Read samples.jsonl; try a smaller "
        f"penalty on length, a reward for the format, a lower roles.actor.optimizer.learning_rate"
    )


def truncated(config: TruncatedConfig, metrics: Metrics, memory: Memory) -> str:
    ratio = metrics["response/truncated_ratio"]
    if ratio < config.limit:
        return ""
    return (
        f"{ratio:.0%} of the responses are truncated (guards.truncated.limit: {config.limit:g}): they end before their "
        f"answer. Usual causes: rollout.sampling.max_new_tokens too small for the task, a model that repeats itself or "
        f"never ends its turn (a base model, a chat template without its end-of-turn token), a reward that pays for "
        f"length. Read samples.jsonl; try more tokens, algorithm.overlong, a warm start"
    )


def duplicates(config: DuplicatesConfig, metrics: Metrics, memory: Memory) -> str | None:
    """Only of responses below the step's best reward: a policy that is sure of a short answer gives it many times."""
    if metrics["reward/std"] == 0:  # the best are the worst, too: `constant_reward` speaks
        return None
    ratio = metrics["response/failed_duplicate_ratio"]
    if ratio < config.limit:
        return ""
    return (
        f"{ratio:.0%} of the responses copy an earlier one of their group and are not among the best "
        f"(guards.duplicates.limit: {config.limit:g}): the policy tries nothing else. Usual causes: collapsed entropy "
        f"after too high a learning rate, a low rollout.sampling.temperature, a narrow top_p or top_k, a server that "
        f"samples with a fixed seed. Try a temperature of 1, the reward diversity, algorithm.entropy_coefficient, a "
        f"higher algorithm.clip_high"
    )


def reward_hacking(config: RewardHackingConfig, metrics: Metrics, memory: Memory) -> str | None:
    """Judges a validation; of steps it remembers the first and the last training rewards since the best one."""
    is_validation = "validation/reward_mean" in metrics
    if not is_validation and not (memory and "reward/mean" in metrics):
        return None
    held_out, since_best, latest = (memory.setdefault(name, []) for name in ("held_out", "since_best", "latest"))
    if not is_validation:
        if len(since_best) < config.window:
            since_best.append(metrics["reward/mean"])
        _remember(latest, metrics["reward/mean"], config.window)
        return None
    value, best = metrics["validation/reward_mean"], max(held_out, default=None)
    held_out.append(value)
    if best is None or value >= best:
        since_best.clear()
        latest.clear()
        return ""
    if len(held_out) < 3 or len(latest) < config.window or value >= best - config.margin:
        return ""
    before, after = fmean(since_best), fmean(latest)
    if after - before <= config.rise:
        return ""
    return (
        f"validation/reward_mean is {value:.3g}, below its best of {best:.3g} (guards.reward_hacking.margin: "
        f"{config.margin:g}), while reward/mean has risen from {before:.3g} to {after:.3g} since "
        f"(guards.reward_hacking.rise: {config.rise:g}): the policy learns the reward and not the task. Usual causes: "
        f"a reward with a loophole, few training prompts seen many times, held-out prompts of another kind. Read the "
        f"best of samples.jsonl and close the loophole; try more prompts, a higher algorithm.kl_coefficient, and the "
        f"checkpoint of the best validation"
    )


def mismatch(config: MismatchConfig, metrics: Metrics, memory: Memory) -> str:
    value, first = metrics["rollout/logprob_diff_mean"], memory.setdefault("first", [])
    if len(first) < MIN_HISTORY:
        first.append(value)
    if len(first) < MIN_HISTORY or value <= max(config.factor * median(first), config.floor):
        return ""
    return (
        f"rollout/logprob_diff_mean is {value:.3g}, more than {config.factor:g} times (guards.mismatch.factor) the "
        f"{median(first):.3g} that it was at first: trainer and server drift apart. Usual causes: a part of the "
        f"weights that does not reach the server, other kernels or dtypes there, experts that are routed differently, "
        f"longer responses of rarer tokens. Try debug.sync_checksum, and algorithm.off_policy against what is left"
    )


def grad_norm(config: GradNormConfig, metrics: Metrics, memory: Memory) -> str | None:
    norm = metrics["grad_norm"]
    if norm == 0:  # nothing was taught; a median of such steps would make spikes of all others
        return None
    usual = _running_median(memory, norm, config.window)
    if usual is None or norm <= max(config.factor * usual, config.floor):
        return ""
    return (
        f"grad_norm is {norm:.3g}, more than {config.factor:g} times (guards.grad_norm.factor) its running median of "
        f"{usual:.3g}. Usual causes: too high a learning rate, broken or extreme samples, ratios far from 1 (many "
        f"updates per step, stale samples), numbers near overflow. Look at clip/ratio and rollout/logprob_diff_max; "
        f"try a lower roles.actor.optimizer.learning_rate, a lower roles.actor.optimizer.clip_grad, fewer "
        f"algorithm.epochs, algorithm.off_policy"
    )


def _running_median(memory: Memory, value: float, window: int) -> float | None:
    """Of up to `window` values before this one, which is then one of them; None while there are too few."""
    values = memory.setdefault("values", [])
    usual = median(values) if len(values) >= MIN_HISTORY else None
    _remember(values, value, window)
    return usual


def _remember(values: list[float], value: float, window: int) -> None:
    values.append(value)
    del values[:-window]


# key of GuardsConfig -> metrics without which it does not look, the guard
GUARDS: dict[str, tuple[set[str], Callable[..., str | None]]] = {
    "constant_reward": ({"reward/mean", "reward/std"}, constant_reward),
    "kl": ({"kl/ref"}, kl),
    "entropy": ({"entropy"}, entropy),
    "short_responses": ({"response/length_mean"}, short_responses),
    "truncated": ({"response/truncated_ratio"}, truncated),
    "duplicates": ({"response/failed_duplicate_ratio", "reward/std"}, duplicates),
    "reward_hacking": (set(), reward_hacking),
    "mismatch": ({"rollout/logprob_diff_mean"}, mismatch),
    "grad_norm": ({"grad_norm"}, grad_norm),
}
