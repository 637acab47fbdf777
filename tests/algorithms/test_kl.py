"""The k3 estimator: by hand, never negative, and safe at any difference."""

import math

import pytest
import torch

from megarl.algorithms.kl import k3


@pytest.mark.parametrize("policy, reference", [(-1.0, -1.0), (-1.0, -2.0), (-2.0, -1.0), (-0.5, -8.0)])
def test_value_worked_by_hand(policy, reference):
    expected = math.exp(reference - policy) - (reference - policy) - 1
    assert k3(torch.tensor(policy), torch.tensor(reference)).item() == pytest.approx(expected, rel=1e-6)


def test_tiny_differences_do_not_cancel_to_noise():
    policy = torch.tensor([-1.0], dtype=torch.float32)
    reference = policy + 2**-14
    assert k3(policy, reference).item() == pytest.approx(2**-29, rel=1e-2)
    assert k3(policy, policy).item() == 0


@pytest.mark.parametrize("difference, value, gradient", [(100.0, math.exp(20) - 21, 0.0), (-100.0, 99.0, 1.0)])
def test_value_and_gradient_are_finite_at_extreme_differences(difference, value, gradient):
    policy = torch.tensor(-1.0, requires_grad=True)
    kl = k3(policy, torch.tensor(-1.0 + difference))
    kl.backward()
    assert kl.item() == pytest.approx(value, rel=1e-6)
    assert policy.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_gradient_below_the_clamp_is_exact():
    policy = torch.tensor(-3.0, requires_grad=True)
    k3(policy, torch.tensor(-1.0)).backward()
    assert policy.grad.item() == pytest.approx(1 - math.exp(2), rel=1e-6)


def test_its_mean_over_the_policy_is_the_kl_divergence():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    expected = (policy * (policy / reference).log()).sum()
    assert (policy * k3(policy.log(), reference.log())).sum().item() == pytest.approx(expected.item(), rel=1e-5)
