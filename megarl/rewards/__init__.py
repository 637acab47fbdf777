"""Rewards: functions (sample) -> float, by name. Importing this loads no torch.

A new rule is one file and one line here.
"""

import math
import numbers
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.errors import RunError
from megarl.rewards.completed import completed
from megarl.rewards.gsm8k import gsm8k
from megarl.rewards.last_integer import last_integer

if TYPE_CHECKING:
    from megarl.sample import Sample

REWARDS: dict[str, Callable[["Sample"], float]] = {
    "gsm8k": gsm8k,
    "last_integer": last_integer,
    "completed": completed,
}

DIGITS = 12  # after the point: sums that are equal but for rounding are equal, as 0.1 + 0.2 and 0.3


def score_by_name(samples: list["Sample"], reward: str | dict[str, float]) -> None:
    """Fill `.reward` by a name of REWARDS, or by several as the sum of weight * part; then `.reward_parts` too.

    Raises RunError as `score`.
    """
    if isinstance(reward, str):
        return score(samples, REWARDS[reward])
    for name in reward:
        score(samples, REWARDS[name])
        for sample in samples:
            sample.reward_parts[name] = sample.reward
    for sample in samples:
        total = math.fsum(weight * sample.reward_parts[name] for name, weight in reward.items())
        sample.reward = round(total, DIGITS)


def score(samples: list["Sample"], reward: Callable[["Sample"], float]) -> None:
    """Fill `.reward` of every sample.

    A reward that failed is not a 0: one that raises, or returns anything but a finite number, is a RunError naming
    the reward, the prompt's source and the value.
    """
    name = getattr(reward, "__name__", repr(reward))
    for sample in samples:
        where = f"reward {name} of a response to {sample.prompt.metadata.get('source', 'a prompt')}"
        try:
            value = reward(sample)
        except Exception as error:  # a reward is anyone's code and may raise anything; every failure stops the run
            raise RunError(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RunError(f"{where} returned {value!r}: wanted a finite number")
        sample.reward = float(value)
