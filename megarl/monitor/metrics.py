"""Numbers of one step from its scored samples. Means over tokens are over the trained tokens."""

import torch

from megarl.algorithms.kl import k3
from megarl.sample import Sample, Status


def sample_metrics(samples: list[Sample], group_size: int) -> dict[str, float]:
    """reward/*, response/*, group/* of samples in group order."""
    rewards_PG = torch.tensor([sample.reward for sample in samples], dtype=torch.float64).view(-1, group_size)
    constant_P = (rewards_PG == rewards_PG[:, :1]).all(dim=1)
    return {
        "reward/mean": rewards_PG.mean().item(),
        "reward/std": rewards_PG.std(unbiased=False).item(),
        "group/zero_std_ratio": constant_P.double().mean().item(),
        "response/length_mean": sum(sample.response_length for sample in samples) / len(samples),
        "response/truncated_ratio": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }


def logprob_metrics(samples: list[Sample], entropies: list[torch.Tensor]) -> dict[str, float]:
    """Trainer against server, entropy of the policy, and KL to the reference (k3, in nats per token) where there is one."""
    mask_T = torch.cat([sample.loss_mask for sample in samples])

    def trained(name: str) -> torch.Tensor:
        return torch.cat([getattr(sample, name) for sample in samples])[mask_T]

    old_T = trained("old_logprobs")
    difference_T = (old_T - trained("rollout_logprobs")).abs()
    metrics = {
        "rollout/logprob_diff_mean": difference_T.mean().item(),
        "rollout/logprob_diff_max": difference_T.max().item(),
        "entropy": torch.cat(entropies)[mask_T].mean().item(),
    }
    if samples[0].ref_logprobs is not None:
        metrics["kl/ref"] = k3(old_T, trained("ref_logprobs")).mean().item()
    return metrics
