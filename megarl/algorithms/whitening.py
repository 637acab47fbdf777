"""Rescaling to mean 0 and standard deviation 1 over the global batch.

No epsilon is added: values that are equal, up to the rounding of their type, become exactly 0.
"""

import torch

from megarl.sample import Sample


def whiten(values: torch.Tensor) -> torch.Tensor:
    """[N] -> [N] float64: (x - mean(x)) / std(x), the standard deviation being the unbiased one; a single value is 0.
    The whitening of PPO for language models (Ziegler et al., arXiv:1909.08593; OpenAI's lm-human-preferences)."""
    if len(values) < 2:
        return torch.zeros(len(values), dtype=torch.float64)
    shifted = values.double() - values[0].double()  # equal values are exactly 0, which their mean is not always
    std = shifted.std(correction=1)
    if std <= torch.finfo(values.dtype).eps * values.abs().max():
        return torch.zeros_like(shifted)
    return (shifted - shifted.mean()) / std


def whiten_rewards(samples: list[Sample]) -> None:
    """Replace each `.reward` by its whitened value over all samples; `reward_parts` stay. What is to be logged of the
    rewards as given must be read before."""
    rewards_B = torch.tensor([sample.require("reward") for sample in samples], dtype=torch.float64)
    for sample, reward in zip(samples, whiten(rewards_B).tolist(), strict=True):
        sample.reward = reward


def whiten_advantages(samples: list[Sample]) -> None:
    """Replace each `.advantages` [L] by its whitened value: mean and standard deviation over the trained tokens of all
    samples, each token weighing the same; 0 where loss_mask is False, whatever stood there."""
    whiten_over_tokens(samples, [sample.require("advantages")[sample.loss_mask] for sample in samples])


def whiten_over_tokens(samples: list[Sample], trained: list[torch.Tensor]) -> None:
    """Fill `.advantages` [L] float32 with the whitened values of `trained`: for each sample, its trained tokens'."""
    if not samples:
        return
    whitened = whiten(torch.cat(trained)).float().split([len(values) for values in trained])
    for sample, values in zip(samples, whitened, strict=True):
        sample.advantages = torch.zeros(len(sample.token_ids)).masked_scatter(sample.loss_mask, values)
