"""The best validation, and when a run stops as none is better any more."""

import json
from math import inf, nan

import pytest
from saving import METRIC, config_of

from megarl.checkpoint.best import BestValidation, metric_of


def follow(best: BestValidation, *values: float, first: int = 1) -> list[bool]:
    return [best.see(step, value) for step, value in enumerate(values, start=first)]


@pytest.mark.parametrize("mode, values", [("max", (1.0, 3.0, 3.0, 2.0, 4.0)), ("min", (-1.0, -3.0, -3.0, -2.0, -4.0))])
def test_the_best_is_the_first_of_its_value(mode, values):
    best = BestValidation("m", mode)
    assert follow(best, *values) == [True, True, False, False, True]
    assert (best.value, best.step, best.num_worse) == (values[-1], 5, 0) and best.why_stop() is None


def test_a_gain_of_min_delta_is_too_small():
    best = BestValidation("m", "max", min_delta=0.5)
    assert follow(best, 1.0, 1.5, 1.75, 2.25, 2.26) == [True, False, True, False, True]


def test_the_run_stops_after_so_many_validations_in_a_row_without_a_better_one():
    best = BestValidation("m", "max", patience=2)
    assert follow(best, 1.0, 0.0, 2.0, 1.5) == [True, False, True, False] and best.why_stop() is None
    best.see(5, 2.0)
    reason = "m has not become better in 2 validations (trainer.early_stop): its best is 2 at step 3"
    assert best.why_stop() == reason
    assert best.see(6, 2.5) and best.why_stop() is None  # where the run went on all the same


def test_what_is_no_number_is_worse_than_any():
    for mode in ("max", "min"):
        best = BestValidation("m", mode, patience=3)
        assert follow(best, nan, nan, nan) == [False] * 3
        assert best.why_stop() == "m has not become better in 3 validations (trainer.early_stop): none was a number"
        assert follow(best, 1.0, nan) == [True, False] and best.num_worse == 1


def test_infinite_values_have_their_place():
    best = BestValidation("m", "max")
    assert follow(best, -inf, -inf, 0.0, inf, inf, 1e300) == [True, False, True, True, False, False]


@pytest.mark.parametrize("at", range(8))
def test_a_resumed_run_goes_on_judging(at):
    values = (1.0, 0.5, nan, 2.0, 1.9, 2.05, 1.0)
    whole = BestValidation("m", "max", min_delta=0.1, patience=3)
    judged = follow(whole, *values)
    first, second = (BestValidation("m", "max", min_delta=0.1, patience=3) for _ in range(2))
    before = follow(first, *values[:at])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.why_stop() == first.why_stop()
    assert before + follow(second, *values[at:], first=at + 1) == judged and second == whole
    assert whole.why_stop() is not None


def test_what_was_the_best_by_another_metric_or_to_the_other_side_is_none():
    before = BestValidation("m", "max")
    follow(before, 3.0, 1.0)
    for now in (BestValidation("other", "max"), BestValidation("m", "min")):
        now.load_state_dict(before.state_dict())
        assert (now.value, now.step, now.num_worse) == (None, None, 0)
    now = BestValidation("m", "max", patience=1)  # which may change
    now.load_state_dict(before.state_dict())
    assert (now.value, now.step) == (3.0, 1) and now.why_stop() is not None


@pytest.mark.parametrize(
    "algorithm, checkpoint, expected",
    [
        ("grpo", {}, (METRIC, "max")),
        ("sft", {}, ("validation/sft/loss", "min")),
        ("dpo", {"metric": "validation/dpo/accuracy"}, ("validation/dpo/accuracy", "max")),
        ("grpo", {"metric": "validation/reward_errors"}, ("validation/reward_errors", "min")),
        ("sft", {"mode": "max"}, ("validation/sft/loss", "max")),
    ],
)
def test_the_metric_and_its_better_side(tmp_path, algorithm, checkpoint, expected):
    assert metric_of(config_of(tmp_path, algorithm={"name": algorithm}, checkpoint=checkpoint)) == expected


def test_patience_comes_from_the_config(tmp_path):
    assert BestValidation.of(config_of(tmp_path)).patience is None
    stop = {"patience": 4, "min_delta": 0.25}
    best = BestValidation.of(config_of(tmp_path, trainer={"early_stop": stop}))
    assert (best.patience, best.min_delta, best.metric, best.mode) == (4, 0.25, METRIC, "max")
