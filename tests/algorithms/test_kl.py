"""KL estimators: by hand, unbiased where they claim it, and safe at any difference."""

import math

import pytest
import torch

from megarl.algorithms.kl import KL_ESTIMATORS, importance_weighted, k3


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


@pytest.mark.parametrize(
    "name, policy, reference, value, gradient",
    [
        ("k1", -1.0, -3.0, 2.0, 1.0),
        ("k1", -3.0, -1.0, -2.0, 1.0),
        ("k2", -1.0, -3.0, 2.0, 2.0),
        ("k2", -3.0, -1.0, 2.0, -2.0),
        ("k3", -1.0, -3.0, math.exp(-2) + 1, 1 - math.exp(-2)),
        ("absolute", -1.0, -3.0, 2.0, 1.0),
        ("absolute", -3.0, -1.0, 2.0, -1.0),
    ],
)
def test_each_estimator_worked_by_hand(name, policy, reference, value, gradient):
    policy = torch.tensor(policy, requires_grad=True)
    kl = KL_ESTIMATORS[name](policy, torch.tensor(reference))
    kl.backward()
    assert (kl.item(), policy.grad.item()) == pytest.approx((value, gradient), rel=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reference, old", [(100, 0), (-100, 0), (0, 100), (0, -100), (100, -100), (-100, 100)])
def test_ratios_of_e_to_the_100_give_finite_values_and_gradients(name, weighted, reference, old):
    policy = torch.tensor(-1.0, requires_grad=True)
    kl = KL_ESTIMATORS[name](policy, torch.tensor(-1.0 + reference))
    if weighted:
        kl = importance_weighted(kl, policy, torch.tensor(-1.0 + old))
    kl.backward()
    assert math.isfinite(kl.item()) and math.isfinite(policy.grad.item())


def test_random_inputs_agree_with_the_formulas_in_float64():
    generator = torch.Generator().manual_seed(0)
    policy, reference, old = (-1 + torch.randn(50, generator=generator) for _ in range(3))
    for p, q, o in zip(policy.tolist(), reference.tolist(), old.tolist()):
        r, weight = math.exp(q) / math.exp(p), math.exp(p) / math.exp(o)
        log_r = math.log(r)
        values = {"k1": -log_r, "k2": log_r**2 / 2, "k3": r - 1 - log_r, "absolute": abs(log_r)}
        assert values.keys() == KL_ESTIMATORS.keys()
        for name, value in values.items():
            kl = KL_ESTIMATORS[name](torch.tensor(p), torch.tensor(q))
            assert kl.item() == pytest.approx(value, rel=1e-4, abs=1e-6)
            weighted = importance_weighted(kl, torch.tensor(p), torch.tensor(o))
            assert weighted.item() == pytest.approx(weight * value, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_importance_weighted_it_is_unbiased_in_value_and_gradient_under_the_old_policy(name):
    """Over all three tokens of a vocabulary, each with its probability under the policy that sampled."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    reference = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    estimate = (old * importance_weighted(KL_ESTIMATORS[name](logprobs, reference), logprobs, old.log())).sum()
    assert estimate.item() == pytest.approx(exact.item(), rel=1e-9)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact)]
    torch.testing.assert_close(*gradients)
    plain = (old * KL_ESTIMATORS[name](logprobs, reference)).sum()
    assert abs(plain.item() - exact.item()) > 0.01
