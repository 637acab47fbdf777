"""Scoring: a reward that failed is not a 0."""

import subprocess
import sys

import pytest

from megarl.errors import RunError
from megarl.rewards import REWARDS, score, score_by_name
from megarl.sample import Prompt, Sample, Status


def samples_with(answers, response="#### 18"):
    prompts = [
        Prompt(messages=[], token_ids=[1], answer=answer, metadata={"source": f"train.jsonl:{line}"})
        for line, answer in enumerate(answers, start=1)
    ]
    return [Sample.from_response(p, [2], group_id=0, index=i, response_text=response) for i, p in enumerate(prompts)]


def test_score_fills_the_reward_of_every_sample():
    samples = samples_with(["18", "19"])
    score(samples, REWARDS["gsm8k"])
    assert [sample.reward for sample in samples] == [1.0, 0.0]
    score(samples, REWARDS["last_integer"])
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_several_rewards_are_parts_of_a_weighted_sum():
    samples = samples_with(["18", "19"])
    samples[1].status = Status.TRUNCATED
    score_by_name(samples, {"gsm8k": 2.0, "completed": -0.5})
    parts = [{"gsm8k": 1.0, "completed": 1.0}, {"gsm8k": 0.0, "completed": 0.0}]
    assert [sample.reward_parts for sample in samples] == parts
    assert [sample.reward for sample in samples] == [1.5, 0.0]
    score_by_name(samples, "completed")
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_importing_rewards_loads_no_torch():
    code = "import sys, megarl.rewards; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), "1", [1.0], 1j])
def test_a_value_that_is_no_finite_number_stops_the_run_and_is_named(value):
    def odd_reward(sample):
        return value

    with pytest.raises(RunError) as error:
        score(samples_with(["18"]), odd_reward)
    for part in ("odd_reward", "train.jsonl:1", repr(value)):
        assert part in str(error.value)


def test_a_reward_that_raises_stops_the_run_with_its_reason():
    with pytest.raises(RunError, match="gsm8k.*train.jsonl:2.*ValueError.*'many'") as error:
        score(samples_with(["18", "many"]), REWARDS["gsm8k"])
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize("value, expected", [(True, 1.0), (0, 0.0), (-0.5, -0.5)])
def test_any_real_number_becomes_a_float(value, expected):
    (sample,) = samples_with(["18"])
    score([sample], lambda sample: value)
    assert type(sample.reward) is float and sample.reward == expected
