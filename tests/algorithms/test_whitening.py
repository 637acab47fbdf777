"""Whitening of rewards and advantages over the global batch."""

import random
from statistics import mean, stdev

import pytest
import torch

from megarl.algorithms.whitening import whiten, whiten_advantages, whiten_rewards
from megarl.sample import Prompt, Sample


def sample_with(advantages=(), reward=0.0):
    prompt = Prompt(messages=[], token_ids=[1, 1])
    sample = Sample.from_response(prompt, [5] * len(advantages), group_id=0, index=0, reward=reward)
    sample.advantages = torch.tensor([0.0, 0.0, *advantages])
    return sample


def test_advantages_worked_by_hand():
    samples = [sample_with([1.0]), sample_with([0.0, 0.0, 0.0])]  # mean 1/4, std 1/2
    whiten_advantages(samples)
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0, 1.5], [0, 0, -0.5, -0.5, -0.5]]
    assert samples[0].advantages.dtype == torch.float32


def test_what_stands_at_masked_positions_changes_nothing_and_becomes_0():
    samples = [sample_with([1.0]), sample_with([0.0, 9.0, 0.0, 0.0])]
    samples[0].advantages[0] = float("nan")
    samples[1].advantages[3] = float("inf")
    samples[1].loss_mask[3] = False
    whiten_advantages(samples)
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0, 1.5], [0, 0, -0.5, 0, -0.5, -0.5]]


def test_advantages_equal_a_loop_at_random_inputs():
    draw = random.Random(0)
    samples = [sample_with([draw.gauss(2, 3) for _ in range(draw.randint(0, 7))]) for _ in range(20)]
    before = [a for sample in samples for a in sample.advantages[2:].tolist()]
    whiten_advantages(samples)
    after = [a for sample in samples for a in sample.advantages[2:].tolist()]
    assert after == pytest.approx([(a - mean(before)) / stdev(before) for a in before], rel=1e-5, abs=1e-6)


def test_rewards_worked_by_hand_and_groups_do_not_matter():
    samples = [sample_with(reward=reward) for reward in (1, 0, 0, 0)]
    samples[0].group_id = 1
    whiten_rewards(samples)
    assert [sample.reward for sample in samples] == [1.5, -0.5, -0.5, -0.5]
    assert isinstance(samples[0].reward, float)


def test_rewards_equal_a_loop_at_random_inputs():
    draw = random.Random(0)
    rewards = [draw.gauss(-4, 2) for _ in range(50)]
    samples = [sample_with(reward=reward) for reward in rewards]
    whiten_rewards(samples)
    expected = [(reward - mean(rewards)) / stdev(rewards) for reward in rewards]
    assert [sample.reward for sample in samples] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("value, count", [(0.1, 8), (0.1, 38), (0.1, 3), (-1e30, 5), (0.7, 1), (0.0, 4)])
def test_equal_values_and_single_ones_become_exactly_0(value, count):
    samples = [sample_with([value], reward=value) for _ in range(count)]
    whiten_advantages(samples)
    whiten_rewards(samples)
    assert all(sample.advantages[-1] == 0 and sample.reward == 0 for sample in samples)


def test_rounding_of_float32_is_not_blown_up():
    almost_equal = torch.tensor([0.1, 0.1, 0.1, 0.1])
    almost_equal[0] = torch.nextafter(almost_equal[0], torch.tensor(1.0))
    assert almost_equal[0] != almost_equal[1]
    assert whiten(almost_equal).tolist() == [0, 0, 0, 0]


def test_a_small_spread_on_a_large_offset_is_not_lost():
    values = torch.tensor([1e6 + 1, 1e6 + 1, 1e6 + 1, 1e6])
    assert whiten(values).tolist() == [0.5, 0.5, 0.5, -1.5]


def test_nothing_to_train_is_no_error():
    samples = [sample_with(), sample_with()]
    whiten_advantages(samples)
    whiten_advantages([])
    assert samples[0].advantages.tolist() == [0, 0]


def test_missing_advantages_and_rewards_are_our_mistake():
    sample = sample_with(reward=None)
    sample.advantages = None
    with pytest.raises(AssertionError, match="no advantages"):
        whiten_advantages([sample])
    with pytest.raises(AssertionError, match="no reward"):
        whiten_rewards([sample])
