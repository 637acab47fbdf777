"""From samples to their rewards: run the functions, settle what becomes of failures, sum the parts up."""

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_rewards import RewardConfig, RewardsConfig, functions_of
from megarl.errors import RunError
from megarl.rewards import MODEL
from megarl.rewards.pool import Call, Outcome, RewardPool, latency_metrics
from megarl.sample import Sample

if TYPE_CHECKING:
    from megarl.rewards.model import RewardModel

DIGITS = 12  # after the point: sums that are equal but for rounding are equal, as 0.1 + 0.2 and 0.3


@dataclass
class Scored:
    """Of one round."""

    samples: list[Sample]  # those that have a reward, in their order
    failures: dict[int, str]  # place of a sample whose reward failed -> why
    metrics: dict[str, float]  # of failures and times


class Scorer:
    """Use as a context: it has processes of its own. They start while it is entered, and go on with that meanwhile.

    `report` gets a line for each round in which rewards failed.
    """

    def __init__(
        self,
        rewards: dict[str, RewardConfig],
        settings: RewardsConfig,
        report: Callable[[str], None],
        logs: Path | None = None,
    ):
        self.rewards = rewards
        self.settings = settings
        self.report = report
        self.model: RewardModel | None = None  # gives the reward of that name; what it needs may start after this
        functions = functions_of(rewards).items()
        calls = [Call(name, function, rewards[name].options) for name, function in functions if function != MODEL]
        num_workers = settings.num_workers or min(max(len(os.sched_getaffinity(0)) // 2, 1), 16)
        limits = (settings.timeout_s, settings.batch_timeout_s, settings.max_concurrent)
        self.pool = RewardPool(calls, num_workers, *limits, logs)

    def __enter__(self) -> "Scorer":
        self.pool.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.pool.__exit__(*exception)

    def score(self, samples: list[Sample], normalize: bool = True) -> Scored:
        """Fill .reward and .reward_parts.

        `normalize`: whether parts are normalized as the config says, or summed up as they are. What fails is dropped as
        `rewards.on_error` says; RunError where it says fail, or where more fail than it allows.
        """
        if not self.rewards:
            return Scored(samples, {}, {})
        wait_model = self.model.start_score(samples) if self.model else None
        allowed = self.allowed(len(samples))
        outcomes = self.pool.run(samples, give_up=lambda num_failed: num_failed > allowed)
        failures = failures_of(outcomes)
        if wait_model and len(failures) <= allowed:
            scores = wait_model()
            outcomes |= {name: scores for name, function in functions_of(self.rewards).items() if function == MODEL}
            failures = failures_of(outcomes)
        if failures:
            self.settle(samples, failures)
        times = latency_metrics([outcome for column in outcomes.values() for outcome in column])
        dropped = set(failures)
        if self.settings.on_error == "drop_group":
            groups = {samples[index].group_id for index in failures}
            dropped = {index for index, sample in enumerate(samples) if sample.group_id in groups}
        kept = []
        for index, sample in enumerate(samples):
            if index not in dropped:
                sample.reward_parts = parts_of({name: outcomes[name][index] for name in self.rewards})
                kept.append(sample)
        sum_up(kept, self.rewards, normalize)
        counts = {"reward/errors": len(failures), "reward/dropped_samples": len(dropped)}
        return Scored(kept, failures, counts | times)

    def allowed(self, num_samples: int) -> int:
        """How many samples of a round may fail."""
        most = round(self.settings.max_error_ratio * num_samples, DIGITS)  # 0.29 of 100 are 29, not 28.999999999999996
        return 0 if self.settings.on_error == "fail" else int(most)

    def settle(self, samples: list[Sample], failures: dict[int, str]) -> None:
        """Stop the run, which then has not waited for the others, or report that it goes on without these samples."""
        on_error, first = self.settings.on_error, next(iter(failures.values()))
        if on_error == "fail":
            raise RunError(f"{first} (rewards.on_error: fail)")
        count = f"{len(failures)} of {len(samples)} rewards failed"
        if len(failures) > (allowed := self.allowed(len(samples))):
            limit = f"rewards.max_error_ratio: {self.settings.max_error_ratio:g} allows {allowed}"
            raise RunError(f"at least {count}, {limit}; the first: {first}")
        self.report(f"warning: {count} (rewards.on_error: {on_error}); the first: {first}")


def failures_of(outcomes: dict[str, list[Outcome]]) -> dict[int, str]:
    """By the sample's place, in order: what failed first of its rewards."""
    failures: dict[int, str] = {}
    for column in outcomes.values():
        for index, outcome in enumerate(column):
            if outcome.error is not None:
                failures.setdefault(index, outcome.error)
    return dict(sorted(failures.items()))


def parts_of(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """The value of each reward by its name, and what a reward's own parts are as NAME/PART."""
    parts: dict[str, float] = {}
    for name, outcome in outcomes.items():
        parts[name] = round(outcome.value, DIGITS)
        parts |= {f"{name}/{part}": value for part, value in outcome.parts.items()}
    return parts


def sum_up(samples: list[Sample], rewards: dict[str, RewardConfig], normalize: bool = True) -> None:
    """Fill .reward: the sum of weight * part, each part normalized over all samples as its config says."""
    columns = {
        name: normalized([sample.reward_parts[name] for sample in samples], part.normalize if normalize else "none")
        for name, part in rewards.items()
    }
    for index, sample in enumerate(samples):
        total = math.fsum(part.weight * columns[name][index] for name, part in rewards.items())
        sample.reward = round(total, DIGITS)


def normalized(values: list[float], how: str) -> list[float]:
    """z_score: less the mean, over the population's standard deviation; min_max: to [0, 1]. Equal values become 0."""
    if how == "none":
        return values
    if max(values, default=0.0) == min(values, default=0.0):
        return [0.0] * len(values)
    if how == "z_score":
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        return [(value - mean) / deviation for value in values]
    low, high = min(values), max(values)
    return [(value - low) / (high - low) for value in values]
