"""From rewards and a critic's values to advantages and returns."""

from itertools import accumulate

import torch

from megarl.sample import Sample


def gae(
    samples: list[Sample],
    gamma: float,
    lam: float | None = None,
    length_adaptive_alpha: float | None = None,
    returns_lam: float | None = None,
    penalties: list[torch.Tensor] | None = None,
) -> None:
    """Fill `.advantages` and `.returns` [L] float32, 0 where loss_mask is False.

    A_t = sum over k of (gamma * lambda)^k * delta_(t+k) with delta_t = r_t + gamma * values_(t+1) - values_t, where t
    counts the trained tokens only: GAE (arXiv:1506.02438), equation 16. The sample's reward lands on its last trained
    token, after which the value is 0, for a truncated response too.
    `penalties`: one [L] tensor for each sample, taken off the reward at each trained token, e.g. for KL. Neither they
    nor `values` are looked at where loss_mask is False.

    lambda is `lam`, or with `length_adaptive_alpha` 1 - 1 / (alpha * l) for l trained tokens: VAPO (arXiv:2504.05118),
    equation 5, whose alpha is 0.05; it is 0 for l <= 1 / alpha, where the formula would be negative.
    returns_t = values_t + A_t, with `returns_lam` in place of lambda if that is given: VAPO's decoupled GAE
    (section 4.1) has 1 there, which makes them sums of rewards without the critic's own bias.
    """
    assert (lam is None) != (length_adaptive_alpha is None), "gae takes either lam or length_adaptive_alpha"
    for i, sample in enumerate(samples):
        mask, reward = sample.loss_mask, sample.require("reward")
        values = sample.require("values")[mask].double()
        rewards = torch.zeros_like(values)
        if penalties is not None:
            rewards -= penalties[i][mask].double()
        rewards[-1:] += reward  # a slice: there may be no trained token
        if length_adaptive_alpha is not None:
            lam = length_adaptive_lambda(len(values), length_adaptive_alpha)
        assert lam is not None
        advantages = _advantages(rewards, values, gamma, lam)
        returns = values + (advantages if returns_lam is None else _advantages(rewards, values, gamma, returns_lam))
        sample.advantages = torch.zeros(len(mask)).masked_scatter(mask, advantages.float())
        sample.returns = torch.zeros(len(mask)).masked_scatter(mask, returns.float())


def length_adaptive_lambda(length: int, alpha: float) -> float:
    """1 - 1 / (alpha * length), and 0 where that is negative."""
    return max(1 - 1 / (alpha * length), 0.0) if length > 0 else 0.0


def _advantages(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """All [N] float64, over the trained tokens of one sample."""
    next_values = torch.cat([values[1:], torch.zeros_like(values[:1])])
    deltas = rewards + gamma * next_values - values
    backwards = accumulate(deltas.flip(0).tolist(), lambda later, delta: delta + gamma * lam * later)
    return torch.tensor(list(backwards), dtype=torch.float64).flip(0)
