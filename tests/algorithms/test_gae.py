"""Generalized advantage estimation: numbers worked by hand, and a double loop in float64."""

import random

import pytest
import torch

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.gae import length_adaptive_lambda
from megarl.data.packing import count_denominators, pack
from megarl.sample import Prompt, Sample, Status

gae = ADVANTAGES["gae"]


def sample_with(values, reward):
    """Two prompt tokens, then one trained token for each value."""
    prompt = Prompt(messages=[], token_ids=[1, 1])
    sample = Sample.from_response(prompt, [5] * len(values), group_id=0, index=0, reward=reward)
    sample.values = torch.tensor([float("nan"), float("nan"), *values])
    return sample


def test_worked_by_hand():
    sample = sample_with([1.0, 2.0, 4.0], reward=6.0)
    gae([sample], gamma=0.5, lam=0.5)
    # deltas: 0.5*2 - 1 = 0; 0.5*4 - 2 = 0; 6 - 4 = 2; each token adds a quarter of the next one's advantage
    assert sample.advantages.tolist() == [0, 0, 0.125, 0.5, 2]
    assert sample.returns.tolist() == [0, 0, 1.125, 2.5, 6]
    assert sample.advantages.dtype == sample.returns.dtype == torch.float32


def test_lambda_1_gives_the_reward_minus_the_value_and_lambda_0_one_step():
    sample = sample_with([1.0, 2.0, 4.0], reward=6.0)
    gae([sample], gamma=1.0, lam=1.0)
    assert (sample.advantages.tolist(), sample.returns.tolist()) == ([0, 0, 5, 4, 2], [0, 0, 6, 6, 6])
    gae([sample], gamma=1.0, lam=0.0)
    assert (sample.advantages.tolist(), sample.returns.tolist()) == ([0, 0, 1, 2, 2], [0, 0, 2, 4, 6])


def test_tokens_that_are_not_trained_are_no_steps():
    plain, with_tool = sample_with([1.0, 2.0, 4.0], 6.0), sample_with([1.0, float("nan"), 2.0, 4.0, 9.0], 6.0)
    with_tool.loss_mask[[3, 6]] = False  # the reward lands on the last trained token
    gae([plain, with_tool], gamma=0.5, lam=0.5)
    for field in ("advantages", "returns"):
        a, b, c = getattr(plain, field)[2:].tolist()
        assert getattr(with_tool, field).tolist() == [0, 0, a, 0, b, c, 0]


def test_penalties_are_taken_off_each_trained_tokens_reward():
    sample = sample_with([1.0, 2.0], reward=6.0)
    gae([sample], gamma=1.0, lam=1.0, penalties=[torch.tensor([float("nan"), float("inf"), 0.5, 0.25])])
    assert sample.advantages.tolist() == [0, 0, 6 - 0.75 - 1, 6 - 0.25 - 2]


def test_returns_may_have_their_own_lambda():
    sample = sample_with([1.0, 2.0, 4.0], reward=6.0)
    gae([sample], gamma=1.0, lam=0.0, returns_lam=1.0)
    assert sample.advantages.tolist() == [0, 0, 1, 2, 2]
    assert sample.returns.tolist() == [0, 0, 6, 6, 6]


def test_length_adaptive_lambda():
    assert length_adaptive_lambda(100, alpha=0.05) == pytest.approx(0.8)
    assert length_adaptive_lambda(2000, alpha=0.05) == pytest.approx(0.99)
    assert [length_adaptive_lambda(length, alpha=0.05) for length in (0, 1, 19, 20)] == [0, 0, 0, 0]


def test_each_sample_has_the_lambda_of_its_own_trained_tokens():
    long, short = sample_with([0.0] * 4, 1.0), sample_with([0.0, 0.0, 0.0], 1.0)
    short.loss_mask[2] = False  # two trained tokens
    gae([long, short], gamma=1.0, length_adaptive_alpha=1.0)
    assert long.advantages.tolist() == pytest.approx([0, 0, 0.75**3, 0.75**2, 0.75, 1])
    assert short.advantages.tolist() == [0, 0, 0, 0.5, 1]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_equals_the_sum_of_the_paper_at_random_inputs(gamma, lam):
    draw = random.Random(0)
    samples = [sample_with([draw.gauss(0, 1) for _ in range(n)], draw.gauss(0, 3)) for n in (1, 2, 7, 40)]
    penalties = [torch.tensor([draw.gauss(0, 1) for _ in sample.token_ids]) for sample in samples]
    gae(samples, gamma, lam, penalties=penalties)
    for sample, penalty in zip(samples, penalties):
        values = sample.values[2:].tolist() + [0.0]
        rewards = [-p for p in penalty[2:].tolist()]
        rewards[-1] += sample.reward
        deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
        sums = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        assert sample.advantages[2:].tolist() == pytest.approx(sums, rel=1e-5, abs=1e-6)
        returns = [a + value for a, value in zip(sums, values)]
        assert sample.returns[2:].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)


def test_length_adaptive_and_decoupled_equal_a_loop_at_random_inputs_with_gaps():
    draw = random.Random(1)
    nan = float("nan")
    samples = [sample_with([draw.gauss(0, 1) for _ in range(n)], draw.gauss(0, 3)) for n in (1, 3, 12, 60)]
    penalties = []
    for sample in samples:
        sample.loss_mask &= torch.tensor([draw.random() < 0.8 for _ in sample.token_ids])
        sample.values[~sample.loss_mask] = nan
        penalties.append(torch.tensor([draw.gauss(0, 1) for _ in sample.token_ids]).masked_fill(~sample.loss_mask, nan))
    gae(samples, gamma=0.99, length_adaptive_alpha=0.05, returns_lam=0.9, penalties=penalties)
    for sample, penalty in zip(samples, penalties):
        mask = sample.loss_mask
        values, rewards = sample.values[mask].tolist() + [0.0], [-p for p in penalty[mask].tolist()]
        length = len(rewards)
        if length:
            rewards[-1] += sample.reward
        deltas = [rewards[t] + 0.99 * values[t + 1] - values[t] for t in range(length)]

        def sums(lam):
            return [sum((0.99 * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]

        advantages = sums(max(1 - 1 / (0.05 * length), 0) if length else 0.0)
        returns = [value + future for value, future in zip(values, sums(0.9))]
        assert sample.advantages[mask].tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-6)
        assert sample.returns[mask].tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)
        assert not sample.advantages[~mask].any() and not sample.returns[~mask].any()


def test_the_reward_lands_on_the_last_trained_token_with_or_without_an_end_of_turn():
    """O08: [5, 6, 7] cut off, and [5, 6, 2] that 2 ended; packed, and padded with tokens whose id is 0."""
    samples = []
    for prompt, response, status in (([1, 2], [5, 6, 7], Status.TRUNCATED), ([3], [5, 6, 2], Status.COMPLETED)):
        fields = dict(group_id=0, index=0, status=status, reward=1.0, values=torch.zeros(len(prompt) + 3))
        samples.append(Sample.from_response(Prompt([], prompt), response, **fields))
    assert [int(sample.loss_mask.sum()) for sample in samples] == [3, 3]
    gae(samples, gamma=1.0, lam=0.0)
    for padding, lasts in (({}, [4, 8]), ({"sequence_multiple": 8, "multiple_of": 24}, [4, 11])):
        batch = pack(samples, *count_denominators(samples), torch.device("cpu"), **padding)
        assert batch.loss_mask.sum() == batch.num_loss_tokens == 6
        assert batch.advantages.nonzero().flatten().tolist() == lasts and batch.advantages.sum() == 2
        assert batch.token_ids[lasts].tolist() == [7, 2]


def test_no_trained_token_gives_zeros():
    sample = sample_with([], reward=1.0)
    gae([sample], gamma=1.0, length_adaptive_alpha=0.05)
    assert (sample.advantages.tolist(), sample.returns.tolist()) == ([0, 0], [0, 0])


def test_missing_values_or_reward_and_two_lambdas_are_our_mistake():
    sample = sample_with([1.0], reward=None)
    with pytest.raises(AssertionError, match="no reward"):
        gae([sample], gamma=1.0, lam=1.0)
    sample.reward, sample.values = 1.0, None
    with pytest.raises(AssertionError, match="no values"):
        gae([sample], gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="either lam or length_adaptive_alpha"):
        gae([sample], gamma=1.0, lam=1.0, length_adaptive_alpha=0.05)


def test_values_and_returns_survive_the_way_between_processes():
    sample = sample_with([1.0, 2.0], reward=1.0)
    gae([sample], gamma=1.0, lam=1.0)
    state = sample.__getstate__()
    copy = Sample.__new__(Sample)
    copy.__setstate__(state)
    assert torch.equal(copy.returns, sample.returns) and torch.equal(copy.values[2:], sample.values[2:])
