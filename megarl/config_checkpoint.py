"""The config's `checkpoint` section, and the early stop of a run."""

from typing import Literal

from pydantic import Field

from megarl.config_section import Section


class CheckpointRoles(Section):
    """A run can only be resumed from a checkpoint with all its trained roles."""

    actor: bool = True
    critic: bool = True


class CheckpointConfig(Section):
    """What is saved, and which checkpoints stay. When: trainer.save_every."""

    roles: CheckpointRoles = Field(CheckpointRoles(), description="switches")
    asynchronous: bool = Field(
        True, description="write while training goes on; a step waits only for the copy to host memory"
    )
    keep_last: int | None = Field(None, ge=1, description="newest checkpoints that stay; null: all")
    keep_every: int = Field(0, ge=0, description="besides: those of every so many steps; 0: none")
    keep_best: int = Field(
        0, ge=0, description="besides: the best by `metric`; a step that is the best is then saved, due or not"
    )
    metric: str | None = Field(
        None, description="of a validation; null: validation/reward_mean, or of a supervised run its validation loss"
    )
    mode: Literal["max", "min"] | None = Field(None, description="which is best; null: min of a loss, max of another")
    save_on: list[Literal["SIGTERM", "SIGUSR1", "SIGINT"]] = Field(
        ["SIGTERM", "SIGUSR1"],
        description="signals on which the run saves and ends; SIGINT is Ctrl-C. The same signal again ends it at once",
    )
    deadline_s: float = Field(120.0, gt=0, description="from such a signal to a complete checkpoint")


class EarlyStopConfig(Section):
    """End the run when checkpoint.metric has not become better for some validations."""

    patience: int = Field(5, ge=1, description="validations in a row without a better one")
    min_delta: float = Field(0.0, ge=0, description="a better one is better by more than this")
