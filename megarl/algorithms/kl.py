"""KL divergence from log-probs of sampled tokens, in nats per token."""

import torch

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8: beyond it float32 exp overflows towards inf and its gradient towards NaN


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) at each token, given tokens sampled by the policy: r - 1 - log r with
    log r = ref_logprobs - logprobs. Any shape, elementwise; never negative.

    "k3" of Schulman, http://joschu.net/blog/kl-approx.html. log r is clamped at +20, so value and gradient stay
    finite: beyond it the value is that at 20 and the gradient 0. It is not clamped below, where k3 is linear.
    """
    log_ratio = torch.clamp(ref_logprobs - logprobs, max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio  # expm1: near 0, exp(x) - 1 would cancel to noise
