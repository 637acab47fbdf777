import pytest
import torch

from megarl.monitor.metrics import agreement_metrics, duplicates, policy_metrics, sample_metrics
from megarl.sample import Prompt, Sample, Status


def sample(reward, num_response=2, status=Status.COMPLETED, group=0, token=5):
    made = Sample.from_response(Prompt([], [1]), [token] * num_response, group_id=group, index=0, status=status)
    made.reward = reward
    return made


def test_rewards_and_responses_by_hand():
    samples = [sample(1, 2), sample(0, 4, Status.TRUNCATED), sample(1, 3, group=1), sample(1, 3, group=1)]
    assert sample_metrics(samples) == {
        "reward/mean": 0.75,
        "reward/std": pytest.approx(0.4330127),  # of all samples: sqrt(0.75 * 0.25)
        "group/zero_variance_groups": 1,
        "group/zero_std_ratio": 0.5,
        "response/length_mean": 3.0,
        "response/truncated_ratio": 0.25,
        "response/duplicate_ratio": 0.25,
        "response/failed_duplicate_ratio": 0.0,  # the copy has the best reward
    }


def test_groups_may_have_lost_samples_and_stand_in_any_order():
    rewards = [(7, 0.0), (3, 1.0), (7, 0.0), (5, 1.0), (3, 0.0), (7, 1.0)]
    metrics = sample_metrics([sample(reward, group=group) for group, reward in rewards])
    assert metrics["group/zero_variance_groups"] == 1  # group 5 has one sample left
    assert metrics["group/zero_std_ratio"] == pytest.approx(1 / 3) and metrics["reward/mean"] == 0.5


def test_duplicates_have_the_tokens_of_an_earlier_response_of_their_group():
    same, longer, other_group, other_token = sample(0.0), sample(0.0, 3), sample(0.0, group=1), sample(0.0, token=6)
    samples = [sample(0.5), longer, same, other_group, other_token]
    assert duplicates(samples) == [same]
    third = sample(0.5)
    metrics = sample_metrics([*samples, third])
    assert metrics["response/duplicate_ratio"] == pytest.approx(2 / 6)
    assert metrics["response/failed_duplicate_ratio"] == pytest.approx(1 / 6)  # `same`, and not `third`


def test_parts_of_a_reward_have_means_over_the_samples_that_have_them():
    samples = [sample(0.5), sample(0.0)]
    samples[0].reward_parts = {"gsm8k": 0.0, "completed": 1.0, "judge/style": 3.0}
    samples[1].reward_parts = {"gsm8k": 0.0, "completed": 0.0}
    metrics = sample_metrics(samples)
    assert metrics["reward/completed_mean"] == 0.5 and metrics["reward/gsm8k_mean"] == 0.0
    assert metrics["reward/judge/style_mean"] == 3.0


def test_without_a_reward_or_without_groups_their_metrics_are_not_there():
    keys = {"response/length_mean", "response/truncated_ratio"}
    assert sample_metrics([sample(None)]).keys() == keys
    assert sample_metrics([sample(None), sample(None)]).keys() == keys | {"response/duplicate_ratio"}
    assert sample_metrics([sample(1.0), sample(0.0, group=1)]).keys() == keys | {"reward/mean", "reward/std"}


def test_differences_and_kl_are_means_over_trained_tokens():
    made = sample(1, 2)  # one prompt token, two trained ones
    made.old_logprobs = torch.tensor([9.0, -1.0, -2.0])
    made.rollout_logprobs = torch.tensor([0.0, -1.5, -2.0])
    made.ref_logprobs = torch.tensor([7.0, -1.0, -2.0 + 0.6931472])
    entropies = [torch.tensor([9.0, 1.0, 2.0])]
    metrics = policy_metrics([made], entropies) | agreement_metrics([made])
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(0.25) and metrics["rollout/logprob_diff_max"] == 0.5
    assert metrics["entropy"] == pytest.approx(1.5)
    assert metrics["kl/ref"] == pytest.approx((0 + (2 - 0.6931472 - 1)) / 2)  # k3 with ratio 2, halved
    made.ref_logprobs = None
    assert "kl/ref" not in policy_metrics([made], entropies)
