"""GRPO advantages against numbers worked by hand."""

import pytest
import torch

from megarl.algorithms import ADVANTAGES
from megarl.sample import Prompt, Sample

grpo = ADVANTAGES["grpo"]


def sample_with(reward, group_id=0, response_length=2):
    prompt = Prompt(messages=[], token_ids=[1, 1, 1])
    return Sample.from_response(prompt, [5] * response_length, group_id=group_id, index=0, reward=reward)


def advantages_of(rewards, normalize_by_std):
    samples = [sample_with(reward) for reward in rewards]
    grpo(samples, normalize_by_std)
    return [sample.advantages[-1].item() for sample in samples]


def test_reference_values_with_the_unbiased_std():
    assert advantages_of([1, 1, 1, 0], True) == [0.5, 0.5, 0.5, -1.5]


def test_reference_values_without_std():
    assert advantages_of([1, 1, 1, 0], False) == [0.25, 0.25, 0.25, -0.75]


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [0.1] * 8, [0.1] * 3, [-1e30] * 5, [0.7]])
def test_equal_rewards_and_single_samples_give_exactly_0(rewards, normalize_by_std):
    assert all(advantage == 0 for advantage in advantages_of(rewards, normalize_by_std))


def test_a_ragged_single_sample_gets_0_beside_a_full_group():
    samples = [sample_with(r, group_id=3) for r in (1, 1, 1, 0)] + [sample_with(1.0, group_id=7)]
    grpo(samples, True)
    assert [s.advantages[-1].item() for s in samples] == [0.5, 0.5, 0.5, -1.5, 0.0]


def test_groups_are_told_by_their_id_and_not_by_their_place():
    rewards_and_groups = [(1, 0), (5, 1), (0, 0), (9, 1)]
    samples = [sample_with(reward, group_id) for reward, group_id in rewards_and_groups]
    grpo(samples, False)
    assert [s.advantages[-1].item() for s in samples] == [0.5, -2.0, -0.5, 2.0]


def test_every_trained_token_has_the_advantage_and_no_other_token():
    samples = [sample_with(1.0, response_length=3), sample_with(0.0, response_length=1)]
    samples[0].loss_mask[4] = False  # a token put in by a tool, say
    grpo(samples, False)
    assert samples[0].advantages.tolist() == [0, 0, 0, 0.5, 0, 0.5]
    assert samples[1].advantages.tolist() == [0, 0, 0, -0.5]
    assert samples[0].advantages.dtype == torch.float32


def test_truncated_and_completed_responses_are_masked_by_length():
    truncated, completed = sample_with(1.0, response_length=3), sample_with(0.0, response_length=3)
    completed.token_ids[-1] = 2  # end of turn: trained like any other token
    grpo([truncated, completed], True)
    assert (truncated.loss_mask.sum(), completed.loss_mask.sum()) == (3, 3)
    assert (truncated.advantages != 0).tolist() == truncated.loss_mask.tolist()
    assert (completed.advantages != 0).tolist() == completed.loss_mask.tolist()


def test_a_small_spread_on_a_large_offset_is_not_lost():
    assert advantages_of([1e6 + 1, 1e6 + 1, 1e6 + 1, 1e6], True) == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-6)


def test_a_sample_without_reward_is_our_mistake():
    with pytest.raises(AssertionError, match="no reward"):
        grpo([sample_with(None)], True)
