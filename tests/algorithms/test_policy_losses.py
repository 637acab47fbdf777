"""Policy losses: by hand, against loops in float64 written from the papers, and however the batch is laid out."""

import math

import pytest
import torch
from batches import make_batch

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.policy_losses import POLICY_LOSSES, Limits
from megarl.data.packing import count_denominators, pack
from megarl.sample import Prompt, Sample


def terms(kind, logprobs, old_logprobs, advantages, lengths, **limits):
    """(losses, gradients, clipped) of tokens that are all trained, as lists."""
    logprobs = torch.tensor(logprobs, requires_grad=True)
    batch = make_batch(lengths, len(logprobs), len(lengths))
    limits = Limits(**{"clip_low": 0.2, "clip_high": 0.2} | limits)
    losses, clipped = POLICY_LOSSES[kind](logprobs, torch.tensor(old_logprobs), torch.tensor(advantages), batch, limits)
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist(), clipped.tolist()


@pytest.mark.parametrize(
    "kind, ratio, advantage, loss, gradient, clipped",
    [
        ("ppo", 1.5, -2.0, 3.0, 3.0, False),
        ("dual_clip", 1.5, 2.0, -2.4, 0.0, True),  # as ppo where A > 0
        ("dual_clip", 5.0, 2.0, -2.4, 0.0, True),
        ("dual_clip", 0.5, -2.0, 1.6, 0.0, True),
        ("dual_clip", 2.9, -2.0, 5.8, 5.8, False),
        ("dual_clip", 4.0, -2.0, 6.0, 0.0, True),  # 3 * 2 and not 4 * 2
        ("gspo", 1.1, 2.0, -2.2, -2.2, False),  # of one token: as ppo
        ("gspo", 1.5, 2.0, -2.4, 0.0, True),
        ("gspo", 1.5, -2.0, 3.0, 3.0, False),
        ("cispo", 1.1, 2.0, 2.2, -2.2, False),  # times -log p = 1
        ("cispo", 1.5, 2.0, 2.4, -2.4, True),  # the gradient goes on, with the clipped weight
        ("cispo", 0.5, -2.0, -1.6, 1.6, True),
        ("sapo", 1.0, 2.0, -4.0, -2.0, False),  # 4 / tau * sigmoid(0) = 2
        ("sapo", 1.0, -2.0, 4.0 / 1.05, 2.0, False),  # the gradient of r A, whatever tau
        ("sapo", 2.0, 1.0, -4 * 0.7310586, -2 * 4 * 0.7310586 * 0.2689414, False),
    ],
)
def test_one_token_worked_by_hand(kind, ratio, advantage, loss, gradient, clipped):
    given = terms(kind, [-1.0], [-1.0 - math.log(ratio)], [advantage], [1])
    assert given == (pytest.approx([loss], abs=1e-5), pytest.approx([gradient], abs=1e-5), [clipped])


def test_gspo_gives_a_sequence_one_ratio_the_geometric_mean_of_its_tokens():
    logs = [math.log(2), -math.log(2), math.log(1.5), math.log(1.5)]  # sequence ratios 1 and 1.5
    losses, gradient, clipped = terms("gspo", logs, [0.0] * 4, [1.0, 1, 1, 1], [2, 2])
    assert losses == pytest.approx([-1, -1, -1.2, -1.2])
    assert gradient == pytest.approx([-1, -1, 0, 0])
    assert clipped == [False, False, True, True]


def test_gspo_per_token_is_gspo_per_sequence_in_value_and_gradient():
    """Equation 5 directly: one term per sequence, differentiated through the ratio."""
    lengths, advantages = [3, 5], [0.7, -1.3]
    generator = torch.Generator().manual_seed(0)
    old, new = -1 + 0.1 * torch.randn(8, generator=generator), -1 + 0.1 * torch.randn(8, generator=generator)
    per_token = torch.repeat_interleave(torch.tensor(advantages), torch.tensor(lengths))
    given = new.clone().requires_grad_()
    batch = make_batch(lengths, 8, 2, old_logprobs=old, advantages=per_token)
    loss, _ = policy_loss(given, batch, 0.2, 0.2, "sequence_mean", kind="gspo")
    loss.backward()
    direct = new.clone().requires_grad_()
    total = 0.0
    for log_ratios, advantage in zip((direct - old).split(lengths), advantages):
        ratio = log_ratios.mean().exp()
        total -= torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) / 2
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-6) and direct.grad.norm() > 0.1
    torch.testing.assert_close(given.grad, direct.grad, rtol=0, atol=1e-6)


def from_the_paper(kind, p, frozen, old, A, lengths, low, high, c, tau_positive, tau_negative):
    """The objective's terms in plain floats. `frozen` stands for log p inside a stop-gradient."""
    objective, begin = [], 0
    for length in lengths:
        tokens = range(begin, begin + length)
        begin += length
        s = math.exp(sum(frozen[t] - old[t] for t in tokens) / length)
        for t in tokens:
            r = math.exp(p[t] - old[t])
            if kind == "gspo":
                r = s * math.exp(p[t]) / math.exp(frozen[t])
            surrogate = min(r * A[t], min(max(r, 1 - low), 1 + high) * A[t])
            if kind == "dual_clip" and A[t] < 0:
                surrogate = max(surrogate, c * A[t])
            elif kind == "cispo":
                surrogate = min(max(math.exp(frozen[t] - old[t]), 1 - low), 1 + high) * A[t] * p[t]
            elif kind == "sapo":
                tau = tau_positive if A[t] > 0 else tau_negative
                surrogate = 1 / (1 + math.exp(-tau * (r - 1))) * 4 / tau * A[t]
            objective.append(surrogate)
    return objective


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_random_inputs_agree_with_a_loop_from_the_paper(kind, seed):
    lengths = [7, 1, 30, 2, 12]
    generator = torch.Generator().manual_seed(seed)
    p, old, A = (torch.randn(sum(lengths), generator=generator).tolist() for _ in range(3))
    limits = (0.2, 0.28, 1.7, 0.9, 1.4)
    names = ("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
    losses, gradient, _ = terms(kind, p, old, A, lengths, **dict(zip(names, limits)))
    expected = from_the_paper(kind, p, p, old, A, lengths, *limits)
    assert losses == pytest.approx([-value for value in expected], rel=1e-4, abs=1e-5)
    step = 1e-6
    for t in range(len(p)):
        moved = ([*p[:t], p[t] + d, *p[t + 1 :]] for d in (step, -step))
        above, below = (sum(from_the_paper(kind, logprobs, p, old, A, lengths, *limits)) for logprobs in moved)
        assert gradient[t] == pytest.approx(-(above - below) / (2 * step), rel=1e-3, abs=1e-4), t


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("difference", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_extreme_ratio_gives_finite_terms_and_gradients(kind, difference, advantage):
    losses, gradient, _ = terms(kind, [-0.5], [-0.5 - difference], [advantage], [1])
    assert math.isfinite(losses[0]) and math.isfinite(gradient[0])


def test_dual_clip_must_be_greater_than_1():
    with pytest.raises(AssertionError, match="dual_clip 1.0"):
        terms("dual_clip", [0.0], [0.0], [1.0], [1], dual_clip=1.0)


def random_samples():
    """Responses of unequal length, one with a gap in its loss mask as a tool's output leaves one."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, (prompt, response) in enumerate([(2, 5), (1, 1), (4, 9), (3, 2)]):
        made = Sample.from_response(Prompt([], [1] * prompt), [2] * response, group_id=0, index=index)
        for name, offset in (("old_logprobs", -1), ("ref_logprobs", -1), ("advantages", 0), ("weights", 1)):
            values = offset + 0.4 * torch.randn(len(made.token_ids), generator=generator)
            setattr(made, name, torch.where(made.loss_mask, values, 0.0))
        samples.append(made)
    samples[2].loss_mask[6:8] = False
    return samples


def loss_and_gradients(samples, kind, aggregation, groups, **padding):
    """Loss and the gradient of each sample's log-probs [L], from micro-batches of these groups of indices."""
    logprobs = {s.index: torch.linspace(-1.5, -0.5, len(s.token_ids)).requires_grad_() for s in samples}
    total = 0.0
    for group in groups:
        batch = pack([samples[i] for i in group], *count_denominators(samples), torch.device("cpu"), **padding)
        packed = torch.full(batch.token_ids.shape, float("nan"))
        places = zip(batch.cu_seqlens.tolist(), group)
        packed = packed.index_put(
            (torch.cat([begin + torch.arange(len(logprobs[i])) for begin, i in places]),),
            torch.cat([logprobs[i] for i in group]),
        )
        loss, _ = policy_loss(packed, batch, 0.2, 0.2, aggregation, 0.1, kind=kind, aggregation_length=16)
        loss.backward()
        total += loss.item()
    return total, torch.cat([logprobs[s.index].grad for s in samples])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"])
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_packed_padded_and_one_by_one_are_the_same(kind, aggregation):
    samples = random_samples()
    loss, gradient = loss_and_gradients(samples, kind, aggregation, [[0, 1, 2, 3]])
    assert gradient.norm() > 1e-3
    for groups, padding in (
        ([[0, 1, 2, 3]], {"sequence_multiple": 16, "multiple_of": 24}),
        ([[3, 0], [2, 1]], {"multiple_of": 8}),
        ([[0], [1], [2], [3]], {}),
    ):
        other_loss, other_gradient = loss_and_gradients(samples, kind, aggregation, groups, **padding)
        assert other_loss == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=0, atol=1e-6)
