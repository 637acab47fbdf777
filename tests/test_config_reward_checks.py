"""Rewards in a config: what is found, with which options, and what is refused before anything starts."""

import sys

import pytest
import yaml
from config_folder import folder, only, refusal  # noqa: F401

from megarl.config import load

REWARDS = """from __future__ import annotations
import functools
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

if TYPE_CHECKING:
    from megarl.sample import Sample


def brevity(sample: Sample, *, limit: Annotated[int, Field(gt=0)] = 40, unit=None) -> float:
    return 1.0


def logged(function):
    @functools.wraps(function)
    def call(*arguments, **options):
        return function(*arguments, **options)

    return call


@logged
def wrapped(samples: list[Sample], *, limit: int) -> list[float]:
    return [1.0 for sample in samples]


class Rule:
    def __call__(self, sample, *, limit: int = 40):
        return 1.0


rule, short = Rule(), functools.partial(brevity, limit=20)


def two(sample, answer):
    return 1.0


def odd_default(sample, *, limit: int = None):
    return 1.0


def odd_annotation(sample, *, rule: Rule | None = None):
    return 1.0


def hidden_annotation(sample, *, other: Sample | None = None):
    return 1.0


def patient(samples, *, timeout_s: float = 400.0):
    return [1.0 for sample in samples]
"""
NO_FUNCTION = "but it is no function of `sample`, or of `samples` for all of them, whose options are keyword-only: "
NO_TYPE = "its options cannot be checked by their annotations: "


@pytest.fixture
def rewards(folder, monkeypatch):
    """Modules in the working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "rewards_of_a_user.py").write_text(REWARDS)
    (folder / "exits_when_imported.py").write_text("import sys\nsys.exit(0)\n")


def of_user(name: str, options: str = "{}") -> str:
    return f"algorithm.reward={{{name}: {{function: rewards_of_a_user:{name}, options: {options}}}}}"


ACCEPTED = {
    "brevity": "{limit: 3, unit: [any, value]}",
    "wrapped": "{limit: 3}",
    "rule": "{limit: 3}",
    "short": "{unit: words}",
    "patient": "{timeout_s: 299}",
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_be_called_with_a_sample_is_a_reward(rewards, name):
    options = load("base.yaml", [of_user(name, ACCEPTED[name])]).algorithm.reward[name].options
    assert options == yaml.safe_load(ACCEPTED[name])


REFUSED = {
    of_user("brevity", "{limit: 0}"): "options.limit: given 0: Input should be greater than 0",
    of_user("brevity", "{limit: '3'}"): "options.limit: given '3': Input should be a valid integer",
    of_user("brevity", "{limt: 3}"): "options.limt: unknown option; did you mean limit?",
    of_user("wrapped"): "options.limit: missing, a required option",
    of_user("two"): f"given 'rewards_of_a_user:two', {NO_FUNCTION}",
    of_user("absent"): "AttributeError: module 'rewards_of_a_user' has no attribute 'absent'",
    of_user("odd_default"): "options.limit: its default is None: Input should be a valid integer",
    of_user("odd_annotation"): f"odd_annotation.function: {NO_TYPE}Unable to generate pydantic-core schema for",
    of_user("hidden_annotation"): f"{NO_TYPE}name 'Sample' is not defined",
    "algorithm.reward=exits_when_imported:one": "given 'exits_when_imported:one', but SystemExit: 0",
    "algorithm.reward=builtins:dict": f"given 'builtins:dict', {NO_FUNCTION}",
    "algorithm.reward=no_such_module:one": "but ModuleNotFoundError: No module named 'no_such_module'",
    "algorithm.reward={a/b: {function: gsm8k}}": "given 'a/b', but metrics are named after it; valid: a name without ",
    "algorithm.reward={format: {options: {pattern: (}}}": "options.pattern: given (: no regular expression: missing )",
    "algorithm.reward={code: {options: {prelude: 'import'}}}": "options.prelude: given import: it is no Python: ",
    "algorithm.reward={judge: {options: {base_url: 'http://h/v1', model: m, low: 20}}}": "options.high: its default is 10.0: valid: above low, which is 20",
    "algorithm.reward={math: {options: {timeout_s: 30}}}": "math.options.timeout_s: 30 s, but rewards.timeout_s = 30 ends each call by then; valid: less, or more there",
    "algorithm.reward={remote: {options: {url: 'http://h', timeout_s: 60, deadline_s: 50}}}": "remote.options.deadline_s: 50 s, but rewards.timeout_s = 30 ends each call by then",
    of_user("patient"): "patient.options.timeout_s: 400 s, but rewards.batch_timeout_s = 300 ends each call by then",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_no_reward_or_not_one_of_its_options_is_refused(rewards, override):
    assert REFUSED[override] in only(refusal(override))


def test_a_limit_of_the_pool_below_that_of_a_reward_is_refused(folder):
    assert only(refusal("algorithm.reward=math", "rewards.timeout_s=4")).startswith(
        "override rewards.timeout_s=4: algorithm.reward.math.options.timeout_s: 5 s, but rewards.timeout_s = 4 ends"
    )
