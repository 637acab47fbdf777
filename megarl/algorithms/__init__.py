"""Algorithms as pure functions of samples and batches, by name. A new estimator is a function, a line here and its name
in `AlgorithmConfig`."""

from collections.abc import Callable

from megarl.algorithms.advantages import (
    distillation,
    dr_grpo,
    gdpo,
    grpo,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from megarl.algorithms.gae import gae

ADVANTAGES: dict[str, Callable] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo,
    "gae": gae,
    "distillation": distillation,
}
