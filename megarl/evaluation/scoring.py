"""From generated samples to a model's result: the same for a validation during training and for `megarl eval`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megarl.config import Config
from megarl.config_rewards import RewardConfig, functions_of
from megarl.errors import ConfigError, RunError
from megarl.evaluation.results import ModelResult, result_of
from megarl.rewards import MODEL, find
from megarl.rewards.scorer import Scorer
from megarl.sample import Sample

AnswerOf = Callable[[str], str | None]


def evaluate_samples(
    name: str, samples: list[Sample], scorer: Scorer, config: Config, settings: dict[str, Any] | None = None
) -> ModelResult:
    """Score samples, parts summed up as they are, and look for their final answers where config.evaluation wants it.

    What of failed rewards is allowed is the scorer's: RunError above it. Below, a failure is an error of its response.
    """
    scored = scorer.score(samples, normalize=False)
    answer_of = None
    if config.evaluation.majority and max(config.evaluation.pass_at) > 1:
        answer_of = find_answer_of(config.algorithm.reward)
    return result_of(name, samples, settings or {}, scored.failures, answer_of)


def find_answer_of(rewards: dict[str, RewardConfig]) -> AnswerOf | None:
    """The `answer_of` in the module of the first reward that has one; None: none has.

        def answer_of(response: str, *, option: float = 1.0) -> str | None

    It gives a response's final answer, as the same text for equal answers, or None where there is none. Options that
    the config gives the reward are handed to it where it has parameters of their names. Raises ConfigError where it
    fails on an empty response.
    """
    for name, function in functions_of(rewards).items():
        module = None if function == MODEL else inspect.getmodule(inspect.unwrap(find(function)))
        if answer_of := getattr(module, "answer_of", None):
            known = inspect.signature(answer_of).parameters
            options = {key: value for key, value in rewards[name].options.items() if key in known}
            with_options = functools.partial(answer_of, **options)
            checked = functools.partial(_checked, f"{module.__name__}.answer_of", with_options)
            try:
                checked("")
            except RunError as error:
                raise ConfigError(f"algorithm.reward.{name}: {error}") from error
            return checked
    return None


def _checked(name: str, answer_of: AnswerOf, response: str) -> str | None:
    try:
        answer = answer_of(response)
    except Exception as error:  # it is anyone's code and may raise anything
        raise RunError(f"{name} fails on {response[-80:]!r}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, str | None):
        raise RunError(f"{name} gives {answer!r} for {response[-80:]!r}: a text or None is wanted")
    return answer
