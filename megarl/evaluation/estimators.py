"""Metrics of one model's responses, and how far they may be off.

A metric is the mean, over prompts, of a number that each prompt has of its own responses: prompts weigh the same.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.errors import ConfigError
from megarl.evaluation.results import ModelResult, PromptResult, Response

CONFIDENCE = 0.95  # of all intervals
NUM_RESAMPLES = 10_000
MAX_DRAWN = 4_000_000  # numbers in memory at a time


@dataclass(frozen=True)
class Estimate:
    """`low` and `high` are None where there is no interval: of a count, and of a single prompt."""

    value: float
    low: float | None
    high: float | None
    n: int  # prompts that it is of


def metrics_of(
    result: ModelResult, ks: Sequence[int], threshold: float = 1.0, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> dict[str, Estimate]:
    """reward_mean, reward/PART, pass@k, maj@k (k > 1), length_mean, truncated_ratio, errors; in this order.

    A response is correct where its reward is at least `threshold`. Those without a reward are counted in `errors` and
    part of length_mean and truncated_ratio only; a prompt with fewer than k others is no part of pass@k and maj@k. A
    metric that no prompt has is missing. Raises ConfigError where k is more than the responses to a prompt.
    """
    values = values_of(result, ks, threshold)
    estimates = estimates_of(values, num_resamples, seed)
    return estimates | {"errors": Estimate(float(_num_errors(result)), None, None, len(result.prompts))}


def validation_metrics(result: ModelResult, ks: Sequence[int] = (1,), threshold: float = 1.0) -> dict[str, float]:
    """The values of `metrics_of` alone, by the same names."""
    values = {name: mean_of(column) for name, column in values_of(result, ks, threshold).items()}
    return values | {"errors": float(_num_errors(result))}


def _num_errors(result: ModelResult) -> int:
    return sum(len(prompt.responses) - len(prompt.scored) for prompt in result.prompts)


# Numbers of a prompt


def values_of(result: ModelResult, ks: Sequence[int], threshold: float) -> dict[str, np.ndarray]:
    """[P] each: the prompts' numbers, nan where one has none."""
    assert result.prompts, f"{result.name}: no prompts"
    most = max(len(prompt.responses) for prompt in result.prompts)
    if wrong := [k for k in ks if not 1 <= k <= most]:
        raise ConfigError(f"{result.name}: pass@k with k={wrong[0]}: there are {most} responses to a prompt")
    rows = [_prompt_values(prompt, ks, threshold, result.has_answers) for prompt in result.prompts]
    found = {name for row in rows for name in row}
    parts = dict.fromkeys(name for row in rows for name in row if name.startswith("reward/"))
    chances = [f"pass@{k}" for k in ks] + [f"maj@{k}" for k in ks]
    names = [name for name in ("reward_mean", *parts, *chances, "length_mean", "truncated_ratio") if name in found]
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in names}


def _prompt_values(prompt: PromptResult, ks: Sequence[int], threshold: float, has_answers: bool) -> dict[str, float]:
    scored, values = prompt.scored, {}
    if scored:
        values["reward_mean"] = prompt.mean_reward
    parts: dict[str, list[float]] = {}
    for response in scored:
        for name, value in response.reward_parts.items():
            parts.setdefault(name, []).append(value)
    values |= {f"reward/{name}": statistics.fmean(column) for name, column in parts.items()}
    num_correct = sum(response.is_correct(threshold) for response in scored)
    for k in ks:
        if k <= len(scored):
            values[f"pass@{k}"] = pass_at_k(len(scored), num_correct, k)
        if has_answers and 1 < k <= len(scored):
            values[f"maj@{k}"] = majority_at_k(*votes_of(scored, threshold), k)
    values["length_mean"] = statistics.fmean(response.num_tokens for response in prompt.responses)
    values["truncated_ratio"] = statistics.fmean(response.truncated for response in prompt.responses)
    return values


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """The chance that of k of n responses, drawn without replacement, at least one is correct.

    Chen et al. 2021 (arXiv:2107.03374), equation 1: 1 - C(n-c, k) / C(n, k), as a product without large numbers.
    """
    assert 1 <= k <= num_responses, f"k={k} of {num_responses} responses"
    if num_responses - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_responses - num_correct + 1, num_responses + 1))


def votes_of(responses: list[Response], threshold: float) -> tuple[list[tuple[int, float]], int]:
    """(for each answer: how many responses gave it, and what share of them is correct; responses without an answer)."""
    correct: dict[str, list[bool]] = {}
    for response in responses:
        if response.answer is not None:
            correct.setdefault(response.answer, []).append(response.is_correct(threshold))
    votes = [(len(column), sum(column) / len(column)) for column in correct.values()]
    return votes, len(responses) - sum(count for count, _ in votes)


def majority_at_k(votes: list[tuple[int, float]], num_silent: int, k: int) -> float:
    """The chance that the majority of k of n responses, drawn without replacement, is correct (self-consistency, Wang
    et al. 2022, arXiv:2203.11171): exact over all C(n, k) choices.

    `votes` and `num_silent` as `votes_of` returns them. A tie is broken at random; an answer is correct as often as
    the responses that gave it are; without any vote it is wrong.
    """
    num_responses = num_silent + sum(count for count, _ in votes)
    assert 1 <= k <= num_responses, f"k={k} of {num_responses} responses"
    drawn_CK = _drawn(num_responses, k)
    correct = 0.0
    for most in range(1, min(k, max((count for count, _ in votes), default=0)) + 1):
        # [0, i, j]: the chance that of the responses seen so far i are drawn, and of their answers j have `most` votes
        # and none more; [1, i, j]: of the same, times the sum of these answers' shares
        chances_2KJ = np.zeros((2, k + 1, k // most + 1))
        chances_2KJ[0, :, 0] = drawn_CK[num_silent + sum(count for count, _ in votes if count < most)]
        for count, share in votes:
            if count >= most:
                leading_2KJ = chances_2KJ[:, :-most, :-1] * drawn_CK[count, most]
                leading_2KJ[1] += share * leading_2KJ[0]
                chances_2KJ = _add_drawn(chances_2KJ, drawn_CK[count, :most])
                chances_2KJ[:, most:, 1:] += leading_2KJ
        correct += (chances_2KJ[1, k, 1:] / np.arange(1, k // most + 1)).sum()
    return float(correct / drawn_CK[num_responses, k])


@functools.lru_cache(maxsize=64)
def _drawn(num_responses: int, k: int) -> np.ndarray:
    """[n+1, k+1]: the chance that of c responses i are drawn, if each is drawn by itself with the chance k/n.

    Among the draws that have k in all, every choice is equally likely; and no number grows as C(n, k) does.
    """
    chance = k / num_responses
    drawn_CK = np.zeros((num_responses + 1, k + 1))
    drawn_CK[0, 0] = 1.0
    for count in range(1, num_responses + 1):
        drawn_CK[count] = drawn_CK[count - 1] * (1.0 - chance)
        drawn_CK[count, 1:] += drawn_CK[count - 1, :-1] * chance
    return drawn_CK


def _add_drawn(chances_2KJ: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """With 0, 1, ... more responses drawn, with these chances."""
    total_2KJ = chances_2KJ * chances[0]
    for i in range(1, len(chances)):
        total_2KJ[:, i:] += chances_2KJ[:, :-i] * chances[i]
    return total_2KJ


# Over prompts


def mean_of(values: np.ndarray) -> float:
    """Over the prompts that have a number; exactly it where all have the same."""
    least: np.float64 = np.nanmin(values)
    return float(least + np.nanmean(values - least))


def estimates_of(values: dict[str, np.ndarray], num_resamples: int, seed: int) -> dict[str, Estimate]:
    """The mean of each [P] of numbers, nan for prompts without one, with its percentile bootstrap interval.

    Prompts are resampled whole, all responses to one together, as responses to one prompt resemble each other. So the
    interval is of the mean over all prompts of this kind, sampled anew: of 100 such evaluations about 95 have it in
    theirs. With fewer than about 20 prompts it is too narrow, and where all have the same number its width of 0 says no
    more than that.
    """
    if not values:
        return {}
    values_PM = np.stack(list(values.values()), axis=1)
    least_M = np.nanmin(values_PM, axis=0)
    means_RM = bootstrap_means(values_PM - least_M, num_resamples, seed)
    tail = (1.0 - CONFIDENCE) / 2
    low_M, high_M = np.nanquantile(means_RM, [tail, 1.0 - tail], axis=0) + least_M
    estimates = {}
    for (name, column), low, high in zip(values.items(), low_M, high_M):
        num_prompts = int(np.count_nonzero(~np.isnan(column)))
        bounds = (float(low), float(high)) if num_prompts > 1 else (None, None)
        estimates[name] = Estimate(mean_of(column), bounds[0], bounds[1], num_prompts)
    return estimates


def bootstrap_means(values_PM: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """[R, M]: column means over P rows drawn with replacement; nan where no row that was drawn has a number."""
    random = np.random.default_rng(seed)
    num_prompts = len(values_PM)
    has_PM = ~np.isnan(values_PM)
    filled_PM = np.where(has_PM, values_PM, 0.0)
    rows, means = max(1, MAX_DRAWN // num_prompts), []
    for start in range(0, num_resamples, rows):
        drawn_RP = random.integers(num_prompts, size=(min(rows, num_resamples - start), num_prompts))
        drawn_RP += num_prompts * np.arange(len(drawn_RP))[:, None]
        times_RP = np.bincount(drawn_RP.ravel(), minlength=drawn_RP.size).reshape(drawn_RP.shape).astype(np.float64)
        with np.errstate(invalid="ignore"):
            means.append((times_RP @ filled_PM) / (times_RP @ has_PM))
    return np.concatenate(means)
