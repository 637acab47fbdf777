"""Numbers of one step from its scored samples. Means over tokens are over the trained tokens."""

import torch

from megarl.algorithms.kl import k3
from megarl.sample import Sample, Status


def sample_metrics(samples: list[Sample], group_size: int) -> dict[str, float]:
    """response/*, and where they have a reward reward/* and group/*, of samples in group order."""
    metrics = {
        "response/length_mean": sum(sample.response_length for sample in samples) / len(samples),
        "response/truncated_ratio": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }
    if samples[0].reward is None:
        return metrics
    rewards_PG = torch.tensor([sample.reward for sample in samples], dtype=torch.float64).view(-1, group_size)
    parts = {
        f"reward/{name}_mean": sum(sample.reward_parts[name] for sample in samples) / len(samples)
        for name in samples[0].reward_parts
    }
    metrics |= parts | {"reward/mean": rewards_PG.mean().item(), "reward/std": rewards_PG.std(unbiased=False).item()}
    if group_size == 1:
        return metrics
    constant_P = (rewards_PG == rewards_PG[:, :1]).all(dim=1)
    return metrics | {
        "group/zero_variance_groups": constant_P.sum().item(),
        "group/zero_std_ratio": constant_P.double().mean().item(),
    }


def agreement_metrics(samples: list[Sample]) -> dict[str, float]:
    """Trainer against server."""
    difference_T = (_trained(samples, "old_logprobs") - _trained(samples, "rollout_logprobs")).abs()
    return {
        "rollout/logprob_diff_mean": difference_T.mean().item(),
        "rollout/logprob_diff_max": difference_T.max().item(),
    }


def policy_metrics(samples: list[Sample], entropies: list[torch.Tensor] | None) -> dict[str, float]:
    """Entropy of the policy, where it is known, and KL to the reference (k3, in nats per token) where there is one."""
    metrics = {}
    if entropies is not None:
        mask_T = torch.cat([sample.loss_mask for sample in samples])
        metrics["entropy"] = torch.cat(entropies)[mask_T].mean().item()
    if samples[0].ref_logprobs is not None:
        metrics["kl/ref"] = k3(_trained(samples, "old_logprobs"), _trained(samples, "ref_logprobs")).mean().item()
    return metrics


def advantage_metrics(samples: list[Sample]) -> dict[str, float]:
    """Of a critic, or of a teacher. Explained variance: 1 - var(returns - values) / var(returns), if returns differ."""
    if samples[0].teacher_logprobs is not None:
        return {"distillation/reverse_kl": -_trained(samples, "advantages").mean().item()}
    if samples[0].returns is None:
        return {}
    returns_N, values_N = _trained(samples, "returns").double(), _trained(samples, "values").double()
    metrics = {"critic/value_mean": values_N.mean().item(), "critic/return_mean": returns_N.mean().item()}
    if returns_N.var() > 0:
        metrics["critic/explained_variance"] = 1 - ((returns_N - values_N).var() / returns_N.var()).item()
    return metrics


def _trained(samples: list[Sample], name: str) -> torch.Tensor:
    return torch.cat([sample.trained(name) for sample in samples])
