"""The coefficient of a KL penalty over the steps of a run."""

import math
from dataclasses import dataclass

MAX_RELATIVE_ERROR = 0.2


@dataclass
class KLController:
    """Fixed without a target. With one, the coefficient rises while the KL is above it and falls while below.

    Ziegler et al. (arXiv:1909.08593), section 2.2: e = clip((KL - target) / target, -0.2, 0.2),
    coefficient *= 1 + K e. The gain K is samples / horizon as in its authors' code: the size of a step does not matter.
    """

    coefficient: float
    target: float | None = None  # in the unit of the KL given to `update`
    horizon: int | None = None  # samples

    def __post_init__(self) -> None:
        if self.target is None and self.horizon is None:
            return
        if not (self.target and self.target > 0 and self.horizon and self.horizon > 0):
            raise ValueError(f"target {self.target}, horizon {self.horizon}: both must be above 0, or neither given")

    def update(self, kl: float, num_samples: int) -> None:
        """After a step of `num_samples` whose mean KL was `kl`."""
        if self.target is None or self.horizon is None:
            return
        assert math.isfinite(kl), f"the KL of a step is {kl}"
        gain = num_samples / self.horizon
        if gain * MAX_RELATIVE_ERROR >= 1:
            raise ValueError(f"{num_samples} samples a step, horizon {self.horizon}: must be more than a fifth of them")
        error = (kl - self.target) / self.target
        self.coefficient *= 1 + gain * max(-MAX_RELATIVE_ERROR, min(MAX_RELATIVE_ERROR, error))

    def state_dict(self) -> dict[str, float]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coefficient = state["coefficient"]
