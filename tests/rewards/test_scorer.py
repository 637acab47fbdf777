"""From outcomes to rewards: a reward that failed is not a 0, and a sum of parts is what the config says."""

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
from scoring import REPORTED, samples_with, scorer

from megarl.config_rewards import RewardConfig
from megarl.errors import RunError
from megarl.rewards.pool import Outcome
from megarl.rewards.scorer import Scorer, normalized, sum_up
from megarl.sample import Status

ONE_FAILS = ["18", "19", "many", "18"]  # the third answer is no number


def test_a_round_fills_rewards_parts_and_times():
    samples = samples_with(["18", "19"])
    scored = scorer("gsm8k").score(samples)
    assert scored.samples == samples and [sample.reward for sample in samples] == [1.0, 0.0]
    assert [sample.reward_parts for sample in samples] == [{"gsm8k": 1.0}, {"gsm8k": 0.0}]
    assert scored.failures == {} and scored.metrics["reward/errors"] == scored.metrics["reward/dropped_samples"] == 0
    assert 0 < scored.metrics["reward/latency_p50_s"] <= scored.metrics["reward/latency_p99_s"]


def test_several_rewards_are_parts_of_a_weighted_sum():
    samples = samples_with(["18", "19"])
    samples[1].status = Status.TRUNCATED
    scorer({"gsm8k": 2.0, "completed": -0.5}).score(samples)
    parts = [{"gsm8k": 1.0, "completed": 1.0}, {"gsm8k": 0.0, "completed": 0.0}]
    assert [sample.reward_parts for sample in samples] == parts
    assert [sample.reward for sample in samples] == [1.5, 0.0]


def test_sums_that_are_equal_but_for_rounding_are_equal():
    (first, second) = samples_with(["18", "18"])
    first.reward_parts, second.reward_parts = {"a": 0.1, "b": 0.2}, {"a": 0.3, "b": 0.0}
    sum_up([first, second], {"a": RewardConfig(), "b": RewardConfig()})
    assert first.reward == second.reward == 0.3


@pytest.mark.parametrize(
    "how, values, expected",
    [
        ("none", [3.0, 5.0], [3.0, 5.0]),
        ("z_score", [3.0, 5.0], [-1.0, 1.0]),
        ("z_score", [1.0, 1.0, 4.0], [-math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2)]),
        ("z_score", [0.1] * 8, [0.0] * 8),
        ("min_max", [-2.0, 0.0, 6.0], [0.0, 0.25, 1.0]),
        ("min_max", [7.0], [0.0]),
        ("min_max", [], []),
    ],
)
def test_parts_are_normalized_over_the_round(how, values, expected):
    assert normalized(values, how) == pytest.approx(expected)


def test_normalization_comes_before_the_weight_and_not_in_a_validation():
    samples = samples_with(["18", "19"])
    mix = scorer({"gsm8k": {"weight": 10.0, "normalize": "z_score"}, "completed": 1.0})
    mix.score(samples)
    assert [sample.reward for sample in samples] == [11.0, -9.0] and samples[0].reward_parts["gsm8k"] == 1.0
    mix.score(samples, normalize=False)
    assert [sample.reward for sample in samples] == [11.0, 1.0]


def test_a_failed_reward_stops_the_run_with_its_reason():
    with pytest.raises(RunError, match=r"gsm8k.*train.jsonl:3.*ValueError.*'many'.*rewards.on_error: fail"):
        scorer("gsm8k").score(samples_with(ONE_FAILS))


def test_a_failed_reward_takes_its_sample_out_if_that_is_wanted():
    scored = scorer("gsm8k", on_error="drop_sample", max_error_ratio=0.25).score(samples_with(ONE_FAILS, group_size=2))
    assert [sample.prompt.answer for sample in scored.samples] == ["18", "19", "18"]
    assert scored.metrics["reward/errors"] == scored.metrics["reward/dropped_samples"] == 1 and list(
        scored.failures
    ) == [2]
    assert "1 of 4 rewards failed (rewards.on_error: drop_sample)" in REPORTED[-1] and "'many'" in REPORTED[-1]


def test_a_failed_reward_takes_its_group_out_if_that_is_wanted():
    scored = scorer("gsm8k", on_error="drop_group", max_error_ratio=0.25).score(samples_with(ONE_FAILS, group_size=2))
    assert [sample.group_id for sample in scored.samples] == [0, 0]
    assert scored.metrics["reward/errors"] == 1 and scored.metrics["reward/dropped_samples"] == 2


def test_normalization_does_not_see_what_was_dropped():
    mix = scorer({"gsm8k": {"normalize": "z_score"}, "completed": 1.0}, on_error="drop_sample", max_error_ratio=0.5)
    scored = mix.score(samples_with(["18", "19", "many"]))
    assert [sample.reward for sample in scored.samples] == [2.0, 0.0]


def test_more_failures_than_allowed_stop_the_run():
    limited = scorer("gsm8k", on_error="drop_sample", max_error_ratio=0.1)
    with pytest.raises(
        RunError, match="1 of 4 rewards failed, rewards.max_error_ratio: 0.1 allows 0; the first: .*many"
    ):
        limited.score(samples_with(ONE_FAILS))


@pytest.mark.parametrize("ratio, num_samples, allowed", [(0.1, 10, 1), (0.1, 9, 0), (0.29, 100, 29), (0.57, 100, 57)])
def test_a_share_that_may_fail_is_a_number_of_samples(ratio, num_samples, allowed):
    assert scorer("gsm8k", on_error="drop_group", max_error_ratio=ratio).allowed(num_samples) == allowed


def with_model(scorer: Scorer, values: list[float | None]) -> Scorer:
    """The reward `model` says these, and fails where it says None."""
    outcomes = [Outcome(value, {}, None if value is not None else "no score", 0.5) for value in values]
    scorer.rewards = scorer.rewards | {"judged": RewardConfig(function="model", weight=2.0)}
    scorer.model = SimpleNamespace(start_score=lambda samples: lambda: outcomes)
    return scorer


def test_the_reward_model_is_a_part_and_its_failures_are_settled_like_others():
    scored = with_model(scorer("gsm8k"), [0.25, -1.0]).score(samples_with(["18", "19"]))
    assert [sample.reward for sample in scored.samples] == [1.5, -2.0] and scored.metrics["reward/latency_p99_s"] > 0.4
    with pytest.raises(RunError, match="no score .rewards.on_error: fail"):
        with_model(scorer("gsm8k"), [0.25, None]).score(samples_with(["18", "19"]))
    dropping = scorer("gsm8k", on_error="drop_sample", max_error_ratio=0.5)
    scored = with_model(dropping, [None, 0.0, 0.0, 1.0]).score(samples_with(ONE_FAILS))
    assert [sample.prompt.answer for sample in scored.samples] == ["19", "18"] and list(scored.failures) == [0, 2]


def test_importing_rewards_loads_nothing_heavy():
    heavy = "torch", "numpy", "sympy", "math_verify", "rapidfuzz", "aiohttp", "openai", "transformers", "ray"
    code = f"import sys, megarl.rewards, megarl.config; assert not {set(heavy)} & set(sys.modules), sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
