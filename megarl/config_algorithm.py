"""The algorithm's section of the config: a preset by name, and its parts."""

from typing import Any, Literal

from pydantic import Field, model_validator

from megarl.config_rewards import Rewards
from megarl.config_section import Section
from megarl.presets import PAIRS, PRESETS, SUPERVISED, with_preset


class GaeConfig(Section):
    """Of `advantage: gae`: megarl.algorithms.gae."""

    gamma: float = Field(1.0, ge=0, le=1)
    lam: float | None = Field(0.95, ge=0, le=1, description="lambda; null where length_adaptive_alpha is given")
    length_adaptive_alpha: float | None = Field(
        None, gt=0, description="lambda = 1 - 1 / (alpha * length); VAPO has 0.05"
    )
    returns_lam: float | None = Field(None, ge=0, le=1, description="lambda of the critic's targets; null: the same")


class DynamicSamplingConfig(Section):
    """Groups of equal rewards are replaced until the step is full; groups too many wait for the next step."""

    max_rounds: int = Field(10, ge=1, description="of generation in a step, which then goes on with the groups it has")
    prompts_per_round: int | None = Field(None, ge=1, description="null: algorithm.prompts_per_step")


class OverlongConfig(Section):
    """What becomes of responses near or at rollout.sampling.max_new_tokens."""

    buffer_tokens: int | None = Field(
        None, ge=1, description="length over which the penalty grows; null: a fifth of it, as in DAPO"
    )
    penalty: float = Field(1.0, ge=0, description="taken off the reward at the full length; 0: none")
    filter: bool = Field(False, description="truncated responses are not trained on")


class OffPolicyConfig(Section):
    """Correction for what the server's log-probs and the trainer's differ by: `megarl.algorithms.off_policy`."""

    kind: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geometric"] = "token_tis"
    low: float = Field(
        0.0, ge=0, le=1, description="smallest ratio trainer / server that is taken as it is; 0: none, not for icepop"
    )
    high: float = Field(2.0, ge=1, description="largest one; for geometric near 1: 1.01")
    veto: float | None = Field(
        None, gt=0, lt=1, description="a token of a smaller ratio takes its sequence out; null: none"
    )


class PreferenceConfig(Section):
    """Of the algorithms on pairs: `megarl.algorithms.preference_losses`."""

    beta: float = Field(0.1, gt=0, description="of dpo and ipo: what a nat away from the reference costs")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="of dpo: share of pairs that are taken to be the wrong way round"
    )
    center: float = Field(0.0, ge=0, description="of reward_model: weight that pulls the sum of a pair's scores to 0")


class AlgorithmConfig(Section):
    """`name` fills the keys below as `megarl.presets` says; each of them can be set on its own."""

    name: Literal[tuple(PRESETS)] = Field(  # type: ignore[valid-type]  # so that a preset is one line elsewhere
        "grpo", description="a preset: megarl.presets"
    )
    prompts_per_step: int = Field(16, ge=1, description="rows of data.train in a step")
    group_size: int = Field(8, ge=1, description="responses per prompt")
    mini_batch_size: int | None = Field(None, ge=1, description="samples per optimizer step; null: all of a step")
    epochs: int = Field(1, ge=1, description="passes over a step's samples")
    reward: Rewards = Field(
        {"gsm8k": {}},  # type: ignore[dict-item]  # validated as the user's are
        description="a name in megarl.rewards.REWARDS, model, or pkg.module:function; or several by name, with their "
        "weights or whole sections: {gsm8k: 1.0, short: {function: length, weight: 0.1, options: {high: 200}}}; null: "
        "none",
    )

    advantage: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gdpo",
        "gae",
        "distillation",
    ] = Field("grpo", description="from rewards to advantages: megarl.algorithms.ADVANTAGES")
    normalize_by_std: bool = Field(
        True, description="of advantage: grpo: divide by the group's unbiased standard deviation"
    )
    gae: GaeConfig = GaeConfig()
    whiten_rewards: bool = Field(
        False, description="over the samples of a step, after the overlong penalty and before the KL is taken off"
    )
    whiten_advantages: bool = Field(False, description="over the trained tokens of a step")
    dynamic_sampling: DynamicSamplingConfig | None = Field(None, description="null: none")
    overlong: OverlongConfig | None = Field(None, description="null: none")

    policy_loss: Literal["ppo", "dual_clip", "gspo", "cispo", "sapo"] = Field(
        "ppo", description="megarl.algorithms.policy_losses"
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="1: the lower side is open, as in CISPO's paper")
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float = Field(3.0, gt=1, description="of policy_loss: dual_clip: bound of a negative advantage's ratio")
    tau_positive: float = Field(1.0, gt=0, description="of policy_loss: sapo: temperature at positive advantages")
    tau_negative: float = Field(1.05, gt=0, description="at the others")
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"] = "sequence_mean"
    aggregation_length: int | None = Field(
        None,
        ge=1,
        description="of loss_aggregation: constant, in tokens; null: rollout.sampling.max_new_tokens, not for sft",
    )
    entropy_coefficient: float = Field(
        0.0, ge=0, description="weight of the policy's entropy, which the loss then rewards"
    )
    old_logprobs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="the log-probs that ratios are taken to: by the trainer's own forward pass, or the server's",
    )
    off_policy: OffPolicyConfig | None = Field(None, description="null: none")

    kl_coefficient: float = Field(0.0, ge=0, description="weight of KL(policy || reference)")
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimator: Literal["k1", "k2", "k3", "absolute"] = Field("k3", description="megarl.algorithms.kl")
    kl_importance_weighted: bool = Field(
        False, description="of kl_in: loss: times the policy's ratio: unbiased for k1 and k3"
    )
    kl_target: float | None = Field(
        None, gt=0, description="of kl/ref, nats per token: kl_coefficient is then only the first one; null: it stays"
    )
    kl_horizon: int | None = Field(None, ge=1, description="with kl_target: samples over which the coefficient adapts")

    value_clip: float | None = Field(
        0.2, gt=0, description="of advantage: gae: bound of the value's change in a step; null: none"
    )
    critic_warmup_steps: int = Field(
        0, ge=0, description="of advantage: gae: first steps, in which only the critic is trained"
    )

    preference: PreferenceConfig = PreferenceConfig()

    @model_validator(mode="before")
    @classmethod
    def fill_from_preset(cls, given: Any) -> Any:
        return with_preset(given)

    @property
    def is_supervised(self) -> bool:
        """Trained on responses that are there: no servers, no rewards."""
        return self.name in SUPERVISED

    @property
    def has_pairs(self) -> bool:
        return self.name in PAIRS

    @property
    def reward_weights(self) -> dict[str, float]:
        return {name: part.weight for name, part in self.reward.items()}

    @property
    def compared_parts(self) -> list[str] | None:
        """The rewards of which each makes an advantage of its own; None: their sum makes it."""
        if self.advantage != "gdpo":
            return None
        return [name for name, weight in self.reward_weights.items() if weight]

    @property
    def preset(self) -> "AlgorithmConfig":
        """All keys as the preset leaves them."""
        return type(self)(name=self.name)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def samples_per_update(self) -> int:
        return self.mini_batch_size or self.samples_per_step
