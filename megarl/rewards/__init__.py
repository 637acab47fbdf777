"""Rewards: functions of a sample, or of all samples of a round, by name. Importing this loads no torch.

    def reward(sample: Sample, *, option: float = 1.0) -> float | dict[str, float]
    async def reward(sample: Sample, ...)
    def reward(samples: list[Sample], ...) -> list[float | dict[str, float]]

Which of them is told by the name of the first parameter. Keyword-only parameters are the options that a config may
give. A dict is named parts, whose sum is the reward, or whose "reward" is, where it has that key: the others are then
only logged. A new rule is one file and one line here; `pkg.module:function` is taken as well.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from megarl.errors import ConfigError
from megarl.rewards.code import code
from megarl.rewards.completed import completed
from megarl.rewards.diversity import diversity
from megarl.rewards.format import format as format_
from megarl.rewards.gsm8k import gsm8k
from megarl.rewards.judge import judge
from megarl.rewards.last_integer import last_integer
from megarl.rewards.length import length
from megarl.rewards.math import math
from megarl.rewards.overlong import overlong
from megarl.rewards.remote import remote

REWARDS: dict[str, Callable] = {
    "gsm8k": gsm8k,
    "math": math,
    "last_integer": last_integer,
    "format": format_,
    "length": length,
    "overlong": overlong,
    "completed": completed,
    "diversity": diversity,
    "code": code,
    "remote": remote,
    "judge": judge,
}
MODEL = "model"  # the reward that a role gives, not a function: roles.reward_model or roles.reward_server


def find(name: str) -> Callable:
    """A function of REWARDS, or what `pkg.module:function` names; the working directory is looked into as well.

    Raises ConfigError for an unknown name, a module that cannot be imported, or what is no reward.
    """
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name:
        known = ", ".join(sorted([*REWARDS, MODEL]))
        raise ConfigError(f"given {name!r}, valid: {known}, or pkg.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # a module is anyone's code and may raise anything
        raise ConfigError(f"given {name!r}, but {type(error).__name__}: {error}") from error
    if not callable(function) or first_parameter(function) not in ("sample", "samples"):
        text = f"given {name!r}, but it is no function whose first parameter is `sample`, or `samples` for all of them"
        raise ConfigError(text)
    return function


def first_parameter(function: Callable) -> str | None:
    return next(iter(inspect.signature(function).parameters), None)


def takes_all(function: Callable) -> bool:
    """Whether it is given all samples of a round at once."""
    return first_parameter(function) == "samples"


def options_model(function: Callable) -> type[BaseModel]:
    """The schema of a reward's options: its keyword-only parameters."""
    fields = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields[name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    settings = ConfigDict(
        extra="forbid", strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
    return create_model("Options", __config__=settings, **fields)
