"""Numbers of one step from its scored samples. Means over tokens are over the trained tokens."""

import torch

from megarl.algorithms.kl import k3
from megarl.sample import Sample, Status


def sample_metrics(samples: list[Sample]) -> dict[str, float]:
    """response/*, and where they have a reward reward/* and group/*. Groups go by `group_id`, whatever their sizes.

    A duplicate has the tokens of an earlier response of its group; a failed one has less than the best of all rewards.
    """
    copies = duplicates(samples)
    has_groups = len({sample.group_id for sample in samples}) < len(samples)
    metrics = {
        "response/length_mean": sum(sample.response_length for sample in samples) / len(samples),
        "response/truncated_ratio": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }
    if has_groups:
        metrics["response/duplicate_ratio"] = len(copies) / len(samples)
    if samples[0].reward is None:
        return metrics
    rewards = [sample.require("reward") for sample in samples]
    rewards_B = torch.tensor(rewards, dtype=torch.float64)
    metrics |= part_means(samples)
    metrics |= {"reward/mean": rewards_B.mean().item(), "reward/std": rewards_B.std(unbiased=False).item()}
    if not has_groups:
        return metrics
    rewards_of: dict[int, set[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        rewards_of.setdefault(sample.group_id, set()).add(reward)
    num_constant = sum(len(of_group) == 1 for of_group in rewards_of.values())
    best = max(rewards)
    return metrics | {
        "response/failed_duplicate_ratio": sum(copy.require("reward") < best for copy in copies) / len(samples),
        "group/zero_variance_groups": num_constant,
        "group/zero_std_ratio": num_constant / len(rewards_of),
    }


def part_means(samples: list[Sample]) -> dict[str, float]:
    """reward/NAME_mean of each part, over the samples that have it."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {f"reward/{name}_mean": sum(values) / len(values) for name, values in parts.items()}


def duplicates(samples: list[Sample]) -> list[Sample]:
    """Those whose response is, token for token, an earlier one of their group."""
    seen, copies = set(), []
    for sample in samples:
        response = (sample.group_id, sample.token_ids[sample.prompt_length :].numpy().tobytes())
        if response in seen:
            copies.append(sample)
        seen.add(response)
    return copies


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
