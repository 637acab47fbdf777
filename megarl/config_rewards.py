"""The sections of the config on rewards: what each is, and how they are run."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from megarl.config_section import Section


class RewardConfig(Section):
    """One reward of the sum."""

    function: str | None = Field(
        None, description="a name in megarl.rewards.REWARDS, model, or pkg.module:function; null: the key's own name"
    )
    weight: float = 1.0
    normalize: Literal["none", "z_score", "min_max"] = Field(
        "none", description="over the samples of a round, before the weight; not in a validation"
    )
    options: dict[str, Any] = Field({}, description="keyword arguments of the function")


def as_rewards(given: Any) -> Any:
    """A name, a pkg.module:function and a number as a weight stand for their sections; null for none."""
    if given is None:
        return {}
    if isinstance(given, str):
        module, colon, function = given.rpartition(":")
        return {function: {"function": given}} if module and colon else {given: {}}
    if not isinstance(given, dict):
        return given
    is_number = {name: type(value) in (int, float) for name, value in given.items()}
    return {name: {"weight": value} if is_number[name] else value for name, value in given.items()}


def functions_of(rewards: dict[str, RewardConfig]) -> dict[str, str]:
    """By the reward's name: the function that it is."""
    return {name: reward.function or name for name, reward in rewards.items()}


def in_short(rewards: dict[str, RewardConfig]) -> dict[str, float | dict] | None:
    """As a config has them."""
    given = {name: reward.model_dump(exclude_defaults=True) for name, reward in rewards.items()}
    return {name: given[name] if given[name].keys() - {"weight"} else rewards[name].weight for name in given} or None


Rewards = Annotated[dict[str, RewardConfig], BeforeValidator(as_rewards), PlainSerializer(in_short)]


class RewardsConfig(Section):
    """How rewards are run, and what becomes of one that fails: that raises, is late, or returns no finite number."""

    on_error: Literal["fail", "drop_sample", "drop_group"] = Field(
        "fail", description="the run stops, or goes on without the sample, or without all samples of its prompt"
    )
    max_error_ratio: float = Field(
        0.1, ge=0, lt=1, description="share of a round's samples that may fail where they are dropped; above, it stops"
    )
    timeout_s: float = Field(30.0, gt=0, description="for the reward of one sample")
    batch_timeout_s: float = Field(300.0, gt=0, description="for a reward that is given all samples of a round at once")
    num_workers: int | None = Field(
        None, ge=1, le=256, description="processes that rewards run in; null: one for every two CPUs, 1 to 16"
    )
    max_concurrent: int = Field(64, ge=1, description="calls of an async reward at a time")
    on_constant: Literal["warn", "stop"] = Field(
        "warn", description="what happens where all rewards of the first step are equal: nothing can be learnt then"
    )
