"""Rewards: functions of a sample, or of all samples of a round, by name. Importing this loads no torch.

    def reward(sample: Sample, *, option: float = 1.0) -> float | dict[str, float]
    async def reward(sample: Sample, ...)
    def reward(samples: list[Sample], ...) -> list[float | dict[str, float]]

Which of them is told by the name of the first parameter. Keyword-only parameters are the options that a config may
give. A dict is named parts, whose sum is the reward, or whose "reward" is, where it has that key: the others are then
only logged. A new rule is one file and one line here; `pkg.module:function` is taken as well. Its module may also have

    def answer_of(response: str) -> str | None

which gives a response's final answer, as the same text for equal answers: by it `megarl eval` counts maj@k.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, PydanticUndefinedAnnotation, PydanticUserError, create_model

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

    Raises ConfigError for an unknown name, a module that cannot be imported, or what cannot be called as a reward.
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
    except (Exception, SystemExit) as error:  # a module is anyone's code and may raise anything
        raise ConfigError(f"given {name!r}, but {type(error).__name__}: {error}") from error
    if not callable(function) or first_parameter(function) not in ("sample", "samples"):
        text = f"given {name!r}, but it is no function of `sample`, or of `samples` for all of them, whose options are "
        raise ConfigError(text + "keyword-only: def reward(sample, *, limit: int = 40)")
    return function


def first_parameter(function: Callable) -> str | None:
    """The one positional argument that it needs; None where it needs more, or is none of Python's own functions."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of a function in C
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    return needed[0] if len(needed) == 1 else None


def takes_all(function: Callable) -> bool:
    """Whether it is given all samples of a round at once."""
    return first_parameter(function) == "samples"


def options_model(function: Callable) -> type[BaseModel]:
    """The schema of a reward's options: its keyword-only parameters.

    Raises ConfigError where an annotation is none that values can be checked by.
    """
    fields = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields[name] = (annotation, ... if parameter.default is parameter.empty else parameter.default)
    settings = ConfigDict(
        extra="forbid", strict=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
    module = getattr(function, "func", function).__module__  # where annotations are text, what it means is found there
    try:
        model = create_model("Options", __config__=settings, __module__=module, **fields)
        model.model_rebuild()
    except (PydanticUserError, PydanticUndefinedAnnotation) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"its options cannot be checked by their annotations: {reason}") from error
    return model
