"""The critic's loss: by hand, and against a loop in float64."""

import math

import pytest
import torch
from batches import make_batch

from megarl.algorithms.value_loss import value_loss


@pytest.mark.parametrize(
    "value, old, target, loss, gradient, clipped",
    [
        (1.0, 1.0, 3.0, 2.0, -2.0, 0),
        (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9, 0),
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0, 1),  # moved towards the return by more than the clip: no further push
        (0.0, 1.0, 3.0, 4.5, -3.0, 0),  # moved away: the full push
        (3.5, 1.0, 3.0, 0.5 * 1.8**2, 0.0, 1),
    ],
)
def test_clipped_loss_worked_by_hand(value, old, target, loss, gradient, clipped):
    values = torch.tensor([value], requires_grad=True)
    batch = make_batch([1], 1, 1, values=torch.tensor([old]), returns=torch.tensor([target]))
    given, metrics = value_loss(values, batch, clip=0.2)
    given.backward()
    assert (given.item(), values.grad.item()) == pytest.approx((loss, gradient), abs=1e-5)
    assert metrics["value_clipped"].item() == clipped
    assert metrics["value_error"].item() == pytest.approx((value - target) ** 2)


def test_without_clip_it_is_half_the_squared_error_and_needs_no_old_values():
    values = torch.tensor([2.0, 0.0], requires_grad=True)
    loss, metrics = value_loss(values, make_batch([2], 2, 1, returns=torch.tensor([3.0, 4.0])), clip=None)
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (1 + 16) / 2) and values.grad.tolist() == [-0.5, -2.0]
    assert metrics["value_clipped"].item() == 0


def test_random_inputs_agree_with_a_loop_over_sequences():
    lengths = [4, 1, 9]
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(14, generator=generator) for _ in range(3))
    mask = (torch.rand(14, generator=generator) < 0.7).tolist()
    batch = make_batch(lengths, sum(mask), 3, loss_mask=mask, values=old, returns=returns)
    loss, _ = value_loss(values, batch, 0.3, "sequence_mean")
    total, begin = 0.0, 0
    for length in lengths:
        trained = [t for t in range(begin, begin + length) if mask[t]]
        begin += length
        for t in trained:
            v, v_old, target = values[t].item(), old[t].item(), returns[t].item()
            moved = min(max(v, v_old - 0.3), v_old + 0.3)
            total += 0.5 * max((v - target) ** 2, (moved - target) ** 2) / len(trained) / 3
    assert loss.item() == pytest.approx(total, rel=1e-5) and math.isfinite(total)


def test_a_clip_without_old_values_is_our_mistake():
    with pytest.raises(AssertionError, match="old values"):
        value_loss(torch.zeros(1), make_batch([1], 1, 1, returns=torch.zeros(1)), clip=0.2)
