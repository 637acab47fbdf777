"""The KL coefficient over steps, by hand."""

import math
import random

import pytest

from megarl.algorithms.kl_controller import KLController


def test_without_a_target_it_is_fixed():
    controller = KLController(0.3)
    controller.update(kl=100.0, num_samples=64)
    assert controller.coefficient == 0.3


@pytest.mark.parametrize(
    "kl, factor",
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 0.1),  # 10 % above the target, gain 256 / 2560
        (5.4, 1 - 0.1 * 0.1),
        (600.0, 1 + 0.1 * 0.2),  # the error is clipped to 20 %
        (0.0, 1 - 0.1 * 0.2),
    ],
)
def test_a_step_changes_it_in_proportion_to_the_clipped_error(kl, factor):
    controller = KLController(0.5, target=6.0, horizon=2560)
    controller.update(kl, num_samples=256)
    assert controller.coefficient == pytest.approx(0.5 * factor)


def test_random_steps_equal_the_formula():
    draw = random.Random(0)
    controller, expected = KLController(0.2, target=3.0, horizon=4000), 0.2
    for _ in range(200):
        kl, num_samples = draw.uniform(0, 9), draw.randint(1, 500)
        controller.update(kl, num_samples)
        expected *= 1 + num_samples / 4000 * min(max((kl - 3.0) / 3.0, -0.2), 0.2)
        assert controller.coefficient == pytest.approx(expected)


def test_it_drives_a_kl_that_falls_with_the_coefficient_to_the_target():
    controller = KLController(0.01, target=2.0, horizon=1000)
    for _ in range(500):
        controller.update(kl=1 / controller.coefficient, num_samples=100)
    assert controller.coefficient == pytest.approx(0.5, rel=1e-3)


def test_its_state_is_one_float_that_a_resumed_run_takes_over():
    controller = KLController(0.5, target=6.0, horizon=2560)
    controller.update(9.0, 256)
    resumed = KLController(0.5, target=6.0, horizon=2560)
    resumed.load_state_dict(controller.state_dict())
    assert resumed == controller and resumed.state_dict() == {"coefficient": pytest.approx(0.51)}


@pytest.mark.parametrize("target, horizon", [(None, 10), (1.0, None), (0.0, 10), (-1.0, 10), (1.0, 0)])
def test_target_and_horizon_go_together_and_are_positive(target, horizon):
    with pytest.raises(ValueError, match=f"target {target}, horizon {horizon}"):
        KLController(0.1, target, horizon)


def test_a_step_that_could_turn_the_sign_and_a_kl_that_is_no_number_are_refused():
    controller = KLController(0.1, target=1.0, horizon=10)
    with pytest.raises(ValueError, match="50 samples a step, horizon 10"):
        controller.update(0.0, num_samples=50)
    with pytest.raises(AssertionError, match="nan"):
        controller.update(math.nan, num_samples=1)
    assert controller.coefficient == 0.1
