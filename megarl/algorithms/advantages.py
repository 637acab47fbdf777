"""From rewards to advantages."""

import torch

from megarl.sample import Sample


def grpo(samples: list[Sample], normalize_by_std: bool) -> None:
    """Fill `.advantages` [L] float32: A_i = (r_i - mean(r)) / std(r) over the group of samples with one group_id, the
    same for every trained token, 0 where loss_mask is False.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision; the standard deviation is the unbiased one.
    Without `normalize_by_std`, A_i = r_i - mean(r): Dr. GRPO (arXiv:2503.20783), section 3.2. No epsilon is added:
    groups of equal rewards, a single sample among them, are told by comparison and get exactly 0.
    """
    for group in _groups(samples):
        rewards_G = [sample.reward for sample in group]
        for sample, advantage in zip(group, _group_advantages(rewards_G, normalize_by_std), strict=True):
            sample.advantages = sample.loss_mask.to(torch.float32) * advantage


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        assert sample.reward is not None, f"sample {sample.index} of group {sample.group_id} has no reward"
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _group_advantages(rewards_G: list[float], normalize_by_std: bool) -> list[float]:
    if all(reward == rewards_G[0] for reward in rewards_G):
        return [0.0] * len(rewards_G)  # by comparison: the mean of eight times 0.1 is not 0.1, and std is not 0
    rewards = torch.tensor(rewards_G, dtype=torch.float64)
    centered = rewards - rewards.mean()
    if normalize_by_std:
        centered = centered / rewards.std(correction=1)
    return centered.tolist()
