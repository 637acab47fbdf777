import pytest
import torch

from megarl.monitor.metrics import agreement_metrics, policy_metrics, sample_metrics
from megarl.sample import Prompt, Sample, Status


def sample(reward, num_response=2, status=Status.COMPLETED):
    made = Sample.from_response(Prompt([], [1]), [5] * num_response, group_id=0, index=0, status=status)
    made.reward = reward
    return made


def test_rewards_and_responses_by_hand():
    samples = [sample(1, 2), sample(0, 4, Status.TRUNCATED), sample(1, 3), sample(1, 3)]
    assert sample_metrics(samples, group_size=2) == {
        "reward/mean": 0.75,
        "reward/std": pytest.approx(0.4330127),  # of all samples: sqrt(0.75 * 0.25)
        "group/zero_variance_groups": 1,
        "group/zero_std_ratio": 0.5,
        "response/length_mean": 3.0,
        "response/truncated_ratio": 0.25,
    }


def test_parts_of_a_reward_have_means_and_without_a_reward_there_is_none():
    samples = [sample(0.5), sample(0.0)]
    samples[0].reward_parts = {"gsm8k": 0.0, "completed": 1.0}
    samples[1].reward_parts = {"gsm8k": 0.0, "completed": 0.0}
    metrics = sample_metrics(samples, group_size=2)
    assert metrics["reward/completed_mean"] == 0.5 and metrics["reward/gsm8k_mean"] == 0.0
    assert not any(key.startswith(("reward", "group")) for key in sample_metrics([sample(None)], group_size=1))


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
