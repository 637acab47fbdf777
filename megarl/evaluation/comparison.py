"""Whether one model is better than another on the same prompts."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megarl.errors import ConfigError, RunError
from megarl.evaluation.estimators import MAX_DRAWN, NUM_RESAMPLES, Estimate, estimates_of
from megarl.evaluation.results import ModelResult, PromptResult
from megarl.rewards.scorer import DIGITS

MAX_EXACT = 20  # prompts whose 2^n signs are all tried
MAX_NAMED = 5  # prompts in a message


@dataclass(frozen=True)
class Comparison:
    """Of `model` with `baseline`, by the mean reward of each prompt."""

    baseline: str
    model: str
    wins: int
    ties: int
    losses: int
    difference: Estimate  # of the mean reward: the model's less the baseline's
    p_value: float
    num_comparisons: int  # with this baseline
    holm_p_value: float  # corrected for their number
    num_left_out: int  # prompts for which one of the two has no reward

    @property
    def win_rate(self) -> float:
        """A tie is half a win."""
        return (self.wins + self.ties / 2) / (self.wins + self.ties + self.losses)


def compare(results: list[ModelResult], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> list[Comparison]:
    """Each further model with the first; nothing for one model.

    Raises ConfigError as `check_same_prompts` does, RunError where no prompt has a reward of both.
    """
    check_same_prompts(results)
    baseline, *others = results
    differences = [differences_of(baseline, model) for model in others]
    if empty := [model.name for model, column in zip(others, differences) if not len(column)]:
        raise RunError(f"{', '.join(empty)} against {baseline.name}: no prompt has a reward of both")
    p_values = [sign_flip_p_value(column, num_resamples, seed) for column in differences]
    comparisons = []
    for model, column, p_value, holm_p_value in zip(others, differences, p_values, holm(p_values)):
        wins, losses = int((column > 0).sum()), int((column < 0).sum())
        comparison = Comparison(
            baseline=baseline.name,
            model=model.name,
            wins=wins,
            ties=len(column) - wins - losses,
            losses=losses,
            difference=estimates_of({"difference": column}, num_resamples, seed)["difference"],
            p_value=p_value,
            num_comparisons=len(others),
            holm_p_value=holm_p_value,
            num_left_out=len(baseline.prompts) - len(column),
        )
        comparisons.append(comparison)
    return comparisons


def check_same_prompts(results: list[ModelResult]) -> None:
    """Raises ConfigError naming prompts that not all models have, have once, or have in the same words; and names that
    several models have."""
    errors = [f"{name}: {count} models have this name" for name, count in _repeated(result.name for result in results)]
    first, prompts_of = results[0], []
    for result in results:
        twice = [source for source, _ in _repeated(prompt.source for prompt in result.prompts)]
        errors += _named(f"{result.name} has more than once", twice)
        prompts_of.append({prompt.source: prompt for prompt in result.prompts})
    known = prompts_of[0]
    for result, prompts in zip(results[1:], prompts_of[1:]):
        errors += _named(f"{first.name} has and {result.name} lacks", [s for s in known if s not in prompts])
        errors += _named(f"{result.name} has and {first.name} lacks", [s for s in prompts if s not in known])
        changed = [s for s, prompt in prompts.items() if s in known and _asked(prompt) != _asked(known[s])]
        errors += _named(f"{first.name} and {result.name} have in other words, or with another answer", changed)
    if errors:
        raise ConfigError("\n".join(errors))


def _repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in Counter(names).items() if count > 1]


def _named(what: str, sources: list[str]) -> list[str]:
    """The message about these prompts; none where there are none."""
    if not sources:
        return []
    more = f" and {len(sources) - MAX_NAMED} more" if len(sources) > MAX_NAMED else ""
    return [f"prompts that {what}: {', '.join(sources[:MAX_NAMED])}{more}"]


def _asked(prompt: PromptResult) -> tuple[list[dict], str | None]:
    return prompt.messages, prompt.answer


def differences_of(baseline: ModelResult, model: ModelResult) -> np.ndarray:
    """[n]: the model's mean reward less the baseline's on each prompt that has rewards of both.

    Rounded, so that means which are equal but for rounding are ties.
    """
    prompts = {prompt.source: prompt for prompt in model.prompts}
    pairs = [(prompts[prompt.source], prompt) for prompt in baseline.prompts]
    differences = [
        round(ours.mean_reward - theirs.mean_reward, DIGITS) for ours, theirs in pairs if ours.scored and theirs.scored
    ]
    return np.array(differences, dtype=np.float64)


def sign_flip_p_value(differences: np.ndarray, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> float:
    """Paired permutation test, two-sided: how often the sum of the differences is at least as far from 0 as it is, if
    each of them has either sign with the same chance, as it has where the models are equally good.

    Exact over all signs where at most MAX_EXACT prompts differ; else (b+1) / (m+1) for b of m random draws of signs
    (Phipson and Smyth 2010, arXiv:1603.05766), so never below 1 / (num_resamples + 1).
    """
    sizes = np.abs(differences[differences != 0])
    limit = abs(differences.sum()) - 1e-9 * sizes.sum()  # sums that are equal but for rounding are equal
    if len(sizes) <= MAX_EXACT:
        sums = np.zeros(1)
        for size in sizes:
            sums = np.concatenate([sums + size, sums - size])
        return float((np.abs(sums) >= limit).mean())
    random = np.random.default_rng(seed)
    rows, as_far = max(1, MAX_DRAWN // len(sizes)), 0
    for start in range(0, num_resamples, rows):
        shape = (min(rows, num_resamples - start), len(sizes))
        is_plus = random.integers(2, size=shape, dtype=np.int8).astype(np.float64)
        as_far += int((np.abs(2.0 * (is_plus @ sizes) - sizes.sum()) >= limit).sum())
    return (as_far + 1) / (num_resamples + 1)


def holm(p_values: list[float]) -> list[float]:
    """Of each test, the level at which Holm's step-down procedure (1979) rejects it: the smallest of m p values times
    m, the next times m-1, and so on, none below one before it and none above 1."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    scaled = [min(1.0, p_values[index] * (len(order) - rank)) for rank, index in enumerate(order)]
    corrected = dict(zip(order, itertools.accumulate(scaled, max)))
    return [corrected[index] for index in range(len(order))]
