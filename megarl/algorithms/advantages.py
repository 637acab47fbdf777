"""From rewards, or a teacher's log-probs, to advantages, without a critic.

Each fills `.advantages` [L] float32, 0 where loss_mask is False. `samples` is the whole step, so its groups are whole
and its statistics those of the global batch. Standard deviations are the unbiased ones and no epsilon is added: a
spread of exactly 0 is told beforehand and gives advantages of exactly 0. So does a group of one, wherever the baseline
is the group's.
"""

import math
from collections.abc import Iterable

import torch

from megarl.algorithms.whitening import whiten_over_tokens
from megarl.errors import RunError
from megarl.sample import Sample

GDPO_RESIDUE = 1e-9  # of the sum of the weights: float64 leaves 1e-16 where parts cancel, real differences are larger


def grpo(samples: list[Sample], normalize_by_std: bool) -> None:
    """A_i = (r_i - mean(r)) / std(r) over the group of samples with one group_id, the same for every trained token.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. Without `normalize_by_std` it is `dr_grpo`.
    """
    for group in _groups(samples):
        _fill(group, _group_advantages([sample.require("reward") for sample in group], normalize_by_std))


def dr_grpo(samples: list[Sample]) -> None:
    """A_i = r_i - mean(r) over the group. Dr. GRPO (arXiv:2503.20783), section 3.2."""
    grpo(samples, normalize_by_std=False)


def rloo(samples: list[Sample]) -> None:
    """A_i = r_i - mean of the rewards of the group's other samples.

    The leave-one-out baseline of REINFORCE, as in Ahmadian et al. (arXiv:2402.14740), section 2.3, whose reward has its
    KL penalty taken off before: `shaping.subtract_penalties`.
    """
    for group in _groups(samples):
        differences_G = _differences(group)
        num_others = max(len(group) - 1, 1)  # a group of one has difference 0
        _fill(group, [d - (sum(differences_G) - d) / num_others for d in differences_G])


def opo(samples: list[Sample]) -> None:
    """A_i = r_i - b with b = sum(l_i r_i) / sum(l_i) over the group, l_i the number of trained tokens of sample i.

    OPO (arXiv:2505.23585), the optimal baseline under gradient norms that grow with the length. Where a response holds
    tokens that are not trained, they are no part of the gradient and so not of l_i.
    """
    for group in _groups(samples):
        differences_G = _differences(group)
        lengths_G = [int(sample.loss_mask.sum()) for sample in group]
        weighted = sum(length * d for length, d in zip(lengths_G, differences_G, strict=True))
        baseline = weighted / max(sum(lengths_G), 1)  # nothing to train: no advantage is used
        _fill(group, [d - baseline for d in differences_G])


def reinforce_plus_plus(samples: list[Sample], penalties: list[torch.Tensor] | None = None) -> None:
    """A_t = r - sum of the penalties from token t to the end, then whitened over all trained tokens of the batch.

    REINFORCE++ (arXiv:2501.03262, version 9), equations 4 and 5. `penalties`: one [L] tensor for each sample, what is
    taken off the reward at each token, e.g. beta * (old_logprobs - ref_logprobs); never looked at where loss_mask is
    False. There are no groups: a prompt's only sample has an advantage like any other.
    """
    advantages = []
    for i, sample in enumerate(samples):
        trained = torch.full((int(sample.loss_mask.sum()),), sample.require("reward"), dtype=torch.float64)
        if penalties is not None:
            trained -= penalties[i][sample.loss_mask].double().flip(0).cumsum(0).flip(0)
        advantages.append(trained)
    whiten_over_tokens(samples, advantages)


def reinforce_plus_plus_baseline(samples: list[Sample]) -> None:
    """A_i = a_i / std(a) with a_i = r_i - mean(r) over the group and std(a) over all samples of the batch.

    REINFORCE++ with baseline (arXiv:2501.03262, version 9), equations 6 and 7. The batch's statistics are taken over
    responses (appendix B.2): their mean is then 0 by construction, so groups of equal rewards keep advantage 0. Over
    tokens it would not be, and such groups would be pushed by the lengths of others.
    """
    groups = _groups(samples)
    rewards_PG = [[sample.require("reward") for sample in group] for group in groups]
    centered = [a for rewards_G in rewards_PG for a in _group_advantages(rewards_G, normalize_by_std=False)]
    _fill([sample for group in groups for sample in group], _divided_by_std(centered))


def gdpo(samples: list[Sample], reward_weights: dict[str, float] | None = None) -> None:
    """A_i = s_i / std(s) over all samples of the batch, with s_i = sum over the reward parts k of
    reward_weights[k] * (r_ik - mean(r_k)) / std(r_k), mean and std of part k over the group.

    GDPO (arXiv:2601.05242), equations 4 to 7. The batch's mean is 0 by construction. Weights are 1 if not given; where
    they are, parts without one are left out. `.reward` is not used. RunError: there are no parts, samples of a group
    differ in theirs, or one is not finite.
    """
    groups = _groups(samples)
    summed: list[float] = []
    total_weight = 0.0
    for group in groups:
        weights_K = _part_weights(group, reward_weights)
        total_weight = max(total_weight, sum(abs(weight) for weight in weights_K.values()))
        sums_G = torch.zeros(len(group), dtype=torch.float64)
        for name, weight in weights_K.items():
            part_G = [sample.reward_parts[name] for sample in group]
            sums_G += weight * torch.tensor(_group_advantages(part_G, normalize_by_std=True), dtype=torch.float64)
        summed += sums_G.tolist()
    summed = [0.0 if abs(s) <= GDPO_RESIDUE * total_weight else s for s in summed]  # std would blow a residue up to 1
    _fill([sample for group in groups for sample in group], _divided_by_std(summed))


def distillation(samples: list[Sample]) -> None:
    """A_t = teacher_logprobs_t - old_logprobs_t at each trained token. Rewards are not used.

    On-policy distillation: a policy gradient that lowers KL(policy || teacher), estimated at the token that the policy
    sampled, where with a discount of 0 no token answers for what follows it. Thinking Machines,
    https://thinkingmachines.ai/blog/on-policy-distillation. MiniLLM (arXiv:2306.08543) counts the later tokens too; GKD
    (arXiv:2306.13649) takes the divergence over the whole vocabulary.
    """
    for sample in samples:
        differences_L = sample.require("teacher_logprobs") - sample.require("old_logprobs")
        sample.advantages = torch.where(sample.loss_mask, differences_L, 0.0)


def _part_weights(group: list[Sample], weights: dict[str, float] | None) -> dict[str, float]:
    """Of the parts that all samples of the group have; where weights are given, of those that have one."""

    def names_of(sample: Sample) -> list[str]:
        return sorted(name for name in sample.reward_parts if weights is None or name in weights)

    names = names_of(group[0])
    of_these = "" if weights is None else f" of {sorted(weights)}"
    for sample in group:
        parts, where = sample.reward_parts, f"gdpo: sample {sample.index} of group {sample.group_id}"
        if not names or names_of(sample) != names:
            text = f"{where} has reward parts {sorted(parts)}: wanted at least one{of_these}, and as its group {names}"
            raise RunError(text)
        if not all(math.isfinite(parts[name]) for name in names):
            raise RunError(f"{where} has reward parts {parts}: wanted finite numbers")
    return {name: 1.0 if weights is None else weights[name] for name in names}


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        sample.require("reward")
        groups.setdefault(sample.group_id, []).append(sample)
    return list(groups.values())


def _fill(samples: list[Sample], advantages: Iterable[float]) -> None:
    for sample, advantage in zip(samples, advantages, strict=True):
        sample.advantages = sample.loss_mask.to(torch.float32) * advantage


def _differences(group: list[Sample]) -> list[float]:
    """Rewards minus that of the group's first sample: no baseline notices, and equal rewards are exactly 0."""
    rewards_G = [sample.require("reward") for sample in group]
    return [reward - rewards_G[0] for reward in rewards_G]


def _group_advantages(rewards_G: list[float], normalize_by_std: bool) -> list[float]:
    if all(reward == rewards_G[0] for reward in rewards_G):
        return [0.0] * len(rewards_G)  # by comparison: the mean of eight times 0.1 is not 0.1, and std is not 0
    rewards = torch.tensor(rewards_G, dtype=torch.float64)
    centered = rewards - rewards.mean()
    if normalize_by_std:
        centered = centered / rewards.std(correction=1)
    return centered.tolist()


def _divided_by_std(values: list[float]) -> list[float]:
    if not any(values):
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    return (tensor / tensor.std(correction=1)).tolist()
