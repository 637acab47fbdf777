"""Rewards and masks before the advantages: by hand, and against loops written from the papers."""

import math
import random

import pytest
import torch

from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.shaping import (
    is_informative,
    kl_penalties,
    mask_truncated,
    overlong_penalties,
    subtract_penalties,
)
from megarl.sample import Prompt, Sample, Status

NAN = float("nan")


def sample_with(response_length=2, reward=0.0, **fields):
    prompt = Prompt(messages=[], token_ids=[1])
    return Sample.from_response(prompt, [5] * response_length, group_id=0, index=0, reward=reward, **fields)


def test_overlong_penalties_worked_by_hand():
    samples = [sample_with(length) for length in (0, 5, 6, 7, 9, 10, 12)]
    given = overlong_penalties(samples, max_tokens=10, buffer_tokens=4, penalty=2.0)
    assert given == [0, 0, 0, -0.5, -1.5, -2, -2]
    assert [sample.reward for sample in samples] == [0] * 7  # the caller adds them


def test_a_buffer_as_long_as_the_limit_falls_from_the_first_token():
    assert overlong_penalties([sample_with(n) for n in (0, 1, 4)], 4, 4, 1.0) == [0, -0.25, -1]


def test_overlong_penalties_equal_the_paper_at_random_lengths():
    draw = random.Random(0)
    for _ in range(100):
        longest = draw.randint(1, 60)
        cache, penalty = draw.randint(1, longest), draw.uniform(0, 3)
        samples = [sample_with(draw.randint(0, longest + 3)) for _ in range(5)]
        for sample, given in zip(samples, overlong_penalties(samples, longest, cache, penalty)):
            y = sample.response_length
            if y <= longest - cache:
                expected = 0.0
            elif y <= longest:
                expected = ((longest - cache) - y) / cache
            else:
                expected = -1.0
            assert given == pytest.approx(penalty * expected) and given <= 0


@pytest.mark.parametrize("buffer_tokens", [0, -1, 5])
def test_a_buffer_outside_of_the_limit_is_our_mistake(buffer_tokens):
    with pytest.raises(AssertionError, match=f"buffer_tokens {buffer_tokens}, max_tokens 4"):
        overlong_penalties([], 4, buffer_tokens, 1.0)


def test_truncated_samples_are_not_trained_and_their_old_mask_is_left_alone():
    samples = [sample_with(status=status) for status in (Status.TRUNCATED, Status.COMPLETED, Status.ABORTED)]
    before = [sample.loss_mask for sample in samples]
    samples[0].reward = 3.0
    assert mask_truncated(samples) == 1 and mask_truncated([]) == 0
    assert [sample.loss_mask.tolist() for sample in samples] == [[False] * 3, [False, True, True], [False, True, True]]
    assert all(mask.tolist() == [False, True, True] for mask in before)
    assert samples[0].reward == 3.0 and samples[0].loss_mask.dtype == torch.bool


def test_kl_penalties_worked_by_hand():
    sample = sample_with(2)
    sample.old_logprobs = torch.tensor([0.0, -1.0, -2.0])
    sample.ref_logprobs = torch.tensor([0.0, -3.0, -2.0])
    by_name = {name: kl_penalties([sample], 0.5, name)[0] for name in KL_ESTIMATORS}
    assert {name: values.tolist() for name, values in by_name.items()} == {
        "k1": [0, 1, 0],
        "k2": [0, 1, 0],
        "k3": [0, pytest.approx(0.5 * (math.exp(-2) + 1)), 0],
        "absolute": [0, 1, 0],
    }
    assert all(values.dtype == torch.float32 for values in by_name.values())


def scored_samples(draw, at_masked=0.0):
    """Unequal lengths, with gaps in the masks; `at_masked` stands where nothing is trained."""
    samples = [sample_with(draw.randint(0, 9), reward=draw.gauss(0, 1)) for _ in range(8)]
    for sample in samples:
        length = len(sample.token_ids)
        sample.loss_mask &= torch.tensor([draw.random() < 0.7 for _ in range(length)])
        for name in ("old_logprobs", "ref_logprobs"):
            values = torch.tensor([draw.gauss(-1, 1) for _ in range(length)])
            setattr(sample, name, torch.where(sample.loss_mask, values, at_masked))
    return samples


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_penalties_and_their_sums_equal_a_loop_at_random_inputs(name):
    samples = scored_samples(random.Random(0))
    rewards = [sample.reward for sample in samples]
    penalties = kl_penalties(samples, 0.3, name)
    subtract_penalties(samples, penalties)
    for sample, reward, given in zip(samples, rewards, penalties):
        expected = []
        fields = (sample.old_logprobs, sample.ref_logprobs, sample.loss_mask)
        for old, ref, trained in zip(*(values.tolist() for values in fields)):
            r, log_r = math.exp(ref - old), ref - old
            kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": r - 1 - log_r, "absolute": abs(log_r)}
            expected.append(0.3 * kl[name] if trained else 0.0)
        assert given.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert sample.reward == pytest.approx(reward - sum(expected), rel=1e-4, abs=1e-6)
        assert isinstance(sample.reward, float)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("rubbish", [NAN, float("inf"), -1e30])
def test_masked_positions_change_neither_penalties_nor_rewards(name, rubbish):
    clean, dirty = scored_samples(random.Random(1)), scored_samples(random.Random(1), at_masked=rubbish)
    penalties, same = kl_penalties(clean, 0.3, name), kl_penalties(dirty, 0.3, name)
    assert [p.tolist() for p in penalties] == [p.tolist() for p in same]
    for sample, penalty in zip(dirty, same):
        penalty[~sample.loss_mask] = rubbish
    subtract_penalties(clean, penalties)
    subtract_penalties(dirty, same)
    assert [sample.reward for sample in clean] == [sample.reward for sample in dirty]


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_ratios_of_e_to_the_100_give_finite_penalties(name, difference):
    sample = sample_with(1)
    sample.old_logprobs, sample.ref_logprobs = torch.tensor([0.0, -1.0]), torch.tensor([0.0, -1.0 + difference])
    subtract_penalties([sample], kl_penalties([sample], 0.1, name))
    assert math.isfinite(sample.reward) and sample.reward != 0


def test_a_penalty_without_reference_is_our_mistake():
    sample = sample_with()
    sample.old_logprobs = torch.zeros(3)
    with pytest.raises(AssertionError, match="no ref_logprobs"):
        kl_penalties([sample], 0.1, "k1")


@pytest.mark.parametrize(
    "rewards, informative",
    [
        ([1.0] * 4, False),
        ([0.0] * 4, False),
        ([0.1] * 8, False),
        ([1.0], False),
        ([1, 1, 1, 0], True),
        ([0.1] * 7 + [0.1 + 1e-12], True),
    ],
)
def test_a_group_is_informative_where_its_rewards_differ(rewards, informative):
    """O06."""
    assert is_informative([sample_with(reward=reward) for reward in rewards]) is informative


def test_equal_sums_of_unequal_parts_are_informative_by_part():
    group = [sample_with(reward=1.0), sample_with(reward=1.0)]
    for sample, parts in zip(group, ({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})):
        sample.reward_parts = parts
    assert is_informative(group, ["right", "short"]) and not is_informative(group)
    group[1].reward_parts, group[1].reward = dict(group[0].reward_parts), 2.0
    assert not is_informative(group, ["right", "short"])
    group[1].reward_parts["short"] = 9.0
    assert is_informative(group, ["right", "short"]) and not is_informative(group, ["right"])
