"""The guards' section of the config: from which value of a metric on `megarl.monitor.guards` raises an alarm.

The defaults are silent in the quickstart, for 150 steps too, and under the algorithms of benchmarks/algorithms.py.
"""

from typing import Literal

from pydantic import Field

from megarl.config_section import Section


class GuardConfig(Section):
    """What all guards have."""

    action: Literal["off", "warn", "stop"] = Field("warn", description="what an alarm does; off: there is none")
    patience: int = Field(5, ge=1, description="steps in a row before it is an alarm")


class ConstantRewardConfig(GuardConfig):
    limit: float = Field(1.0, gt=0, le=1, description="of group/zero_std_ratio: share of groups of equal rewards")


class KLGuardConfig(GuardConfig):
    """Single steps mean little: k3 has a heavy tail."""

    high: float | None = Field(1.0, gt=0, description="of kl/ref, nats per token; null: no upper bound")
    low: float | None = Field(None, gt=0, description="the same; null: no lower bound")


class EntropyConfig(GuardConfig):
    """It falls in good runs too, as the policy becomes sure: in the quickstart to a tenth."""

    share: float | None = Field(
        0.05, gt=0, lt=1, description="of the median of its first ten steps, below which entropy is low; null: none"
    )
    low: float | None = Field(None, gt=0, description="the same in nats per token; null: none")


class ShortResponsesConfig(GuardConfig):
    share: float = Field(0.5, gt=0, lt=1, description="of the running median of response/length_mean")
    window: int = Field(20, ge=10, description="steps of the running median")
    patience: int = Field(3, ge=1, le=5, description="steps in a row: after more of them the median has followed")


class TruncatedConfig(GuardConfig):
    limit: float = Field(0.8, gt=0, le=1, description="of response/truncated_ratio")


class DuplicatesConfig(GuardConfig):
    """Copies of good responses are what a policy that is sure of short answers gives; those of others are not."""

    limit: float = Field(
        0.4,
        gt=0,
        lt=1,
        description="of response/failed_duplicate_ratio: share of responses that copy an earlier one of their group "
        "and have less than the best reward of the step",
    )


class RewardHackingConfig(GuardConfig):
    """Speaks from the third validation on. A part that is normalized by z_score hides what it rises by."""

    margin: float = Field(
        0.1, gt=0, description="by which validation/reward_mean is below its best, in the reward's unit"
    )
    rise: float = Field(0.02, ge=0, description="by which reward/mean has risen since that validation, more than this")
    window: int = Field(10, ge=1, description="steps over which reward/mean is averaged, then and at the end")
    patience: int = Field(1, ge=1, description="validations in a row before it is an alarm")


class MismatchConfig(GuardConfig):
    """The bound that ends a run is rollout.logprob_diff_limit."""

    factor: float = Field(
        3.0, gt=1, description="times the median of rollout/logprob_diff_mean in its first ten steps: above has grown"
    )
    floor: float = Field(1e-5, ge=0, description="differences up to this are float32's rounding")


class GradNormConfig(GuardConfig):
    """Steps without any gradient are not counted."""

    factor: float = Field(10.0, gt=1, description="times the running median of grad_norm: above is a spike")
    floor: float = Field(1.0, ge=0, description="norms up to this are none, whatever came before")
    window: int = Field(20, ge=10, description="steps of the running median")
    patience: int = Field(1, ge=1, le=5, description="steps in a row: after more of them the median has followed")


class GuardsConfig(Section):
    repeat_every: int = Field(50, ge=1, description="steps after which an alarm that lasts is raised again")
    constant_reward: ConstantRewardConfig = ConstantRewardConfig()
    kl: KLGuardConfig = KLGuardConfig()
    entropy: EntropyConfig = EntropyConfig()
    short_responses: ShortResponsesConfig = ShortResponsesConfig()
    truncated: TruncatedConfig = TruncatedConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    reward_hacking: RewardHackingConfig = RewardHackingConfig()
    mismatch: MismatchConfig = MismatchConfig()
    grad_norm: GradNormConfig = GradNormConfig()
