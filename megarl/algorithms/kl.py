"""KL divergence from log-probs of sampled tokens, in nats per token.

Estimates of KL(policy || reference) at each token, given tokens sampled by the policy, with r = p_reference / p_policy.
Any shape, elementwise, float32; value and gradient are finite at any finite log r. Schulman,
http://joschu.net/blog/kl-approx.html, names them.
"""

from collections.abc import Callable

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it float32 exp overflows towards inf and its gradient towards NaN


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """-log r: unbiased, of either sign. For a reward: as a loss its gradient, that of log p, is 0 in the mean."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log r)^2 / 2: biased, never negative; in the mean its gradient is that of the KL divergence."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r: unbiased, never negative; its gradient is in the mean that of KL(reference || policy).

    log r is clamped at +20, so value and gradient stay finite: beyond it the value is that at 20 and the gradient 0. It
    is not clamped below, where k3 is linear.
    """
    log_ratio = torch.clamp(ref_logprobs - logprobs, max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio  # expm1: near 0, exp(x) - 1 would cancel to noise


def absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """|log r|: a distance with a gradient of -1, 0 or 1 and no estimate of the divergence."""
    return (logprobs - ref_logprobs).abs()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "absolute": absolute,
}


def importance_weighted(kl: torch.Tensor, logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """p_policy / p_old * `kl` for tokens that the old policy sampled: with k1 or k3 value and gradient are unbiased.

    DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, "Unbiased KL Estimate", equation 7, with k3. The gradient goes
    through the ratio too; its logarithm is clamped at +20.
    """
    return torch.exp(torch.clamp(logprobs - old_logprobs, max=MAX_LOG_RATIO)) * kl
