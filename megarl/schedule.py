"""The learning rate of a step."""

import math

from megarl.config import OptimizerConfig


def learning_rate(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """At `step` (from 1) of `num_steps`: linear warm-up to the peak, a plateau, then down to `final_fraction` of it.

    The fall begins after `decay_from` of the steps, at the earliest after the warm-up, and ends at the last step: in a
    straight line, or along half a cosine period (SGDR, arXiv:1608.03983, equation 5, without restarts).
    """
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    fall = _fall(settings, step, num_steps) * (1.0 - settings.final_fraction)
    return settings.learning_rate * (warmup * (1.0 - fall))


def _fall(settings: OptimizerConfig, step: int, num_steps: int) -> float:
    """Share of the way down, from 0 to 1."""
    start = max(settings.decay_from * num_steps, settings.warmup_steps)
    if settings.schedule == "constant" or step <= start:
        return 0.0
    progress = (step - start) / (num_steps - start)
    return progress if settings.schedule == "linear" else (1.0 - math.cos(math.pi * progress)) / 2
