"""The learning rate of each step, against values worked by hand."""

import pytest

from megarl.config import OptimizerConfig, WarmStartConfig
from megarl.schedule import learning_rate


def rates(steps, num_steps, **settings):
    optimizer = OptimizerConfig(learning_rate=2.0, **settings)
    return [learning_rate(optimizer, step, num_steps) for step in steps]


def test_without_a_schedule_the_rate_is_the_peak_at_every_step():
    assert rates([1, 50, 100], 100) == [2.0, 2.0, 2.0]
    assert rates([1, 2, 4, 5, 100], 100, warmup_steps=4) == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_a_linear_schedule_rises_stays_and_falls_to_its_final_share():
    settings = {"warmup_steps": 10, "schedule": "linear", "decay_from": 0.5, "final_fraction": 0.1}
    assert rates([1, 5, 10, 50, 75, 100], 100, **settings) == pytest.approx([0.2, 1.0, 2.0, 2.0, 1.1, 0.2])


def test_a_cosine_schedule_falls_along_half_a_period():
    """Ways down after a quarter, a third, a half and the whole: (1 - cos 45 deg) / 2, (1 - cos 60 deg) / 2, 1/2, 1."""
    settings = {"schedule": "cosine", "final_fraction": 0.2}
    expected = [2 - 1.6 * 0.1464466, 2 - 1.6 * 0.25, 2 - 1.6 * 0.5, 2 - 1.6]
    assert rates([3, 4, 6, 12], 12, **settings) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_fall_waits_for_the_warmup_and_its_ends_are_exact(schedule):
    settings = {"schedule": schedule, "final_fraction": 0.0}
    assert rates([1, 4, 7, 10], 10, warmup_steps=4, **settings) == pytest.approx([0.5, 2.0, 1.0, 0.0])
    assert rates([9, 10], 10, decay_from=0.95, **settings) == [2.0, 0.0]
    assert rates([9, 10], 10, decay_from=1.0, **settings) == [2.0, 2.0]
    assert rates([1, 2], 2, warmup_steps=2, **settings) == [1.0, 2.0]


def test_the_defaults_of_the_warm_start_rise_for_30_steps_and_fall_from_the_middle():
    settings = WarmStartConfig()
    rates = [learning_rate(settings.optimizer, step, settings.steps) for step in (1, 15, 30, 300, 450, 600)]
    assert rates == pytest.approx([6e-3 / 30, 3e-3, 6e-3, 6e-3, 6e-3 * 0.55, 6e-4])
    assert settings.optimizer.weight_decay == 0.01
