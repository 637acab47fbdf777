"""The best validation of a run, and when to stop as none is better any more."""

import math
from dataclasses import asdict, dataclass

from megarl.config import Config


def metric_of(config: Config) -> tuple[str, str]:
    """(Name of the validation metric that decides, "max" or "min")."""
    algorithm, checkpoint = config.algorithm, config.checkpoint
    usual = f"validation/{algorithm.name}/loss" if algorithm.is_supervised else "validation/reward_mean"
    metric = checkpoint.metric or usual
    last_word = metric.rpartition("/")[2]
    return metric, checkpoint.mode or ("min" if "loss" in last_word or "error" in last_word else "max")


def num_best(config: Config) -> int:
    """Checkpoints that stay for being the best."""
    return max(config.checkpoint.keep_best, int(config.trainer.early_stop is not None))


@dataclass
class BestValidation:
    """Follows one metric over the validations of a run."""

    metric: str
    mode: str
    min_delta: float = 0.0
    patience: int | None = None  # None: never stop
    value: float | None = None  # of the best
    step: int | None = None  # of the best
    num_worse: int = 0  # validations since then

    @classmethod
    def of(cls, config: Config) -> "BestValidation":
        stop = config.trainer.early_stop
        return cls(*metric_of(config), **(dict(stop) if stop else {}))

    def see(self, step: int, value: float) -> bool:
        """Whether this validation is the best so far. A value that is not a number is worse than any."""
        gain = math.inf if self.value is None else (value - self.value) * (1 if self.mode == "max" else -1)
        if math.isnan(value) or not gain > self.min_delta:
            self.num_worse += 1
            return False
        self.value, self.step, self.num_worse = value, step, 0
        return True

    def why_stop(self) -> str | None:
        if self.patience is None or self.num_worse < self.patience:
            return None
        best = f"its best is {self.value:.6g} at step {self.step}" if self.step is not None else "none was a number"
        return f"{self.metric} has not become better in {self.num_worse} validations (trainer.early_stop): {best}"

    def state_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if key not in ("min_delta", "patience")}

    def load_state_dict(self, state: dict) -> None:
        """Nothing where another metric was followed, or to the other side."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.step, self.num_worse = state["value"], state["step"], state["num_worse"]
