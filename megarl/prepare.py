"""From a step's scored samples to what the losses read: the parts of an algorithm in the order in which they act."""

import inspect
from collections.abc import Callable
from typing import Any

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.off_policy import correction
from megarl.algorithms.shaping import kl_penalties, mask_truncated, overlong_penalties, subtract_penalties
from megarl.algorithms.whitening import whiten_advantages, whiten_rewards
from megarl.config import Config
from megarl.monitor.metrics import advantage_metrics
from megarl.sample import Sample


def prepare(samples: list[Sample], config: Config, kl_coefficient: float) -> dict[str, float]:
    """Fill .advantages, with a critic .returns, with a correction .weights; changes .reward and .loss_mask on the way.

    Of a reward: minus what it is too long, whitened, minus `kl_coefficient` * KL if that is in the reward. Estimators
    that give each token an advantage of its own take the KL token by token, the others its sum. Samples that the
    overlong filter takes out of the loss are part of their group's statistics all the same. Returns metrics.
    """
    algorithm, metrics = config.algorithm, {}
    if (overlong := algorithm.overlong) is not None and overlong.penalty > 0:
        longest, buffer = config.rollout.sampling.max_new_tokens, config.overlong_buffer_tokens
        penalties = overlong_penalties(samples, longest, buffer, overlong.penalty)
        for sample, penalty in zip(samples, penalties, strict=True):
            sample.reward += penalty
        metrics["overlong/penalty_mean"] = sum(penalties) / len(samples)
    if algorithm.whiten_rewards:
        whiten_rewards(samples)
    estimate = ADVANTAGES[algorithm.advantage]
    keywords = keywords_of(estimate, algorithm, algorithm.gae)
    if algorithm.kl_in == "reward" and kl_coefficient > 0:
        penalties_L = kl_penalties(samples, kl_coefficient, algorithm.kl_estimator)
        if "penalties" in inspect.signature(estimate).parameters:
            keywords["penalties"] = penalties_L
        else:
            subtract_penalties(samples, penalties_L)
    estimate(samples, **keywords)
    if overlong is not None and overlong.filter:
        metrics["overlong/filtered_ratio"] = mask_truncated(samples) / len(samples)
    if any(sample.loss_mask.any() for sample in samples):
        metrics |= advantage_metrics(samples)
    if algorithm.whiten_advantages:
        whiten_advantages(samples)
    return metrics | correct(samples, config)


def keywords_of(function: Callable, *sections: Any) -> dict[str, Any]:
    """The parameters of `function` that are keys of the config's sections."""
    names = inspect.signature(function).parameters
    return {name: getattr(section, name) for section in sections for name in names if hasattr(section, name)}


def correct(samples: list[Sample], config: Config) -> dict[str, float]:
    """Fill .weights as algorithm.off_policy says; metrics of it."""
    settings = config.algorithm.off_policy
    if settings is None:
        return {}
    weights, metrics = correction(samples, settings.kind, settings.low, settings.high, settings.veto)
    for sample, weights_L in zip(samples, weights):
        sample.weights = weights_L
    return {f"off_policy/{name}": value for name, value in metrics.items()}
