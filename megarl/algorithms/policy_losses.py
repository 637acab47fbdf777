"""The policy term of the loss at each token, by name: objectives of the literature, negated.

Each takes logprobs, old_logprobs and advantages [T], all 0 where batch.loss_mask is False, and returns (losses [T],
clipped [T] bool: where the clip was active). r is exp(logprobs - old_logprobs), A the advantage, sg a stop of the
gradient. log r is clamped to +-20; a gradient through r ends there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.kl import MAX_LOG_RATIO
from megarl.sample import Batch


@dataclass(frozen=True)
class Limits:
    """How far from the old policy a token still teaches; each loss reads what its formula has."""

    clip_low: float  # r is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float
    dual_clip: float = 3.0  # c > 1
    tau_positive: float = 1.0  # SAPO's temperatures, for positive advantages and for all others
    tau_negative: float = 1.05


Terms = tuple[Tensor, Tensor]


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, limits: Limits) -> Terms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Clipped: tokens whose gradient ends.

    PPO (arXiv:1707.06347) equation 7; clip_high > clip_low is "clip-higher", DAPO (arXiv:2503.14476) equation 10.
    """
    return _clipped_objective(_ratio(logprobs - old_logprobs), advantages, limits)


def dual_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, limits: Limits) -> Terms:
    """PPO's, but where A < 0 the objective is at least c A, c = dual_clip > 1: a token grown much likelier than when it
    was sampled cannot dominate the step. Clipped: tokens whose gradient ends.

    Ye et al. (arXiv:1912.09729), equation 5: max(min(r A, clip(r) A), c A) for A < 0.
    """
    assert limits.dual_clip > 1, f"dual_clip {limits.dual_clip}: must be greater than 1"
    losses_T, clipped_T = ppo(logprobs, old_logprobs, advantages, batch, limits)
    bounds_T = -limits.dual_clip * advantages
    beyond_T = (advantages < 0) & (losses_T > bounds_T)
    return torch.where(beyond_T, bounds_T, losses_T), clipped_T | beyond_T


def gspo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, limits: Limits) -> Terms:
    """PPO's with one ratio s for a whole sequence: the exponential of the mean of log r over its trained tokens.
    Clipped: tokens whose gradient ends, which are all those of a sequence where their advantages agree in sign.

    GSPO (arXiv:2507.18071) equations 5 and 7, in the form of GSPO-token, equations 13 and 14: sg[s] * p / sg[p], so
    that value and gradient are per token; under `sequence_mean` and equal advantages they sum to GSPO's. Its clip
    ranges are a thousandth of PPO's (the paper's: 3e-4 and 4e-4).
    """
    counts_B = sequence_sums(batch.loss_mask.to(logprobs.dtype), batch).clamp(min=1)
    mean_log_ratios_B = sequence_sums((logprobs - old_logprobs).detach(), batch) / counts_B
    own_T = torch.exp(logprobs - logprobs.detach())  # 1, with the gradient of log p
    return _clipped_objective(_ratio(mean_log_ratios_B)[batch.sequence_ids] * own_T, advantages, limits)


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, limits: Limits) -> Terms:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p: the clip bounds a token's weight and never ends its gradient.
    Clipped: tokens whose weight the clip changed.

    CISPO, MiniMax-M1 (arXiv:2506.13585) equations 4 and 5, which leaves the lower side open: clip_low = 1. It does not
    give its clip_high; ScaleRL (arXiv:2510.13786), appendix A.18, finds weights of up to 4, 5 and 8 equally good.
    """
    ratio_T = _ratio((logprobs - old_logprobs).detach())
    weights_T = torch.clamp(ratio_T, 1 - limits.clip_low, 1 + limits.clip_high)
    return -weights_T * advantages * logprobs, weights_T != ratio_T


def sapo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, limits: Limits) -> Terms:
    """-sigmoid(tau (r - 1)) * 4 / tau * A, tau = tau_positive where A > 0 and tau_negative elsewhere: the gradient is
    that of -r A at r = 1 and fades on both sides. Clipped: none, as there is no clip.

    SAPO, Soft Adaptive Policy Optimization (arXiv:2511.20347) equations 5 and 6.
    """
    ratio_T = _ratio(logprobs - old_logprobs)
    tau_T = torch.where(advantages > 0, limits.tau_positive, limits.tau_negative)
    losses_T = -torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T * advantages
    return losses_T, torch.zeros_like(batch.loss_mask)


POLICY_LOSSES: dict[str, Callable[..., Terms]] = {
    "ppo": ppo,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
}


def sequence_sums(values_T: Tensor, batch: Batch) -> Tensor:
    """[T] -> [B], the sum over each sequence of the batch."""
    sums_B = torch.zeros(len(batch.cu_seqlens) - 1, dtype=values_T.dtype, device=values_T.device)
    return sums_B.index_add(0, batch.sequence_ids, values_T)


def _ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(torch.clamp(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped_objective(ratio_T: Tensor, advantages_T: Tensor, limits: Limits) -> Terms:
    unclipped_T = ratio_T * advantages_T
    clipped_T = torch.clamp(ratio_T, 1 - limits.clip_low, 1 + limits.clip_high) * advantages_T
    return -torch.minimum(unclipped_T, clipped_T), clipped_T < unclipped_T
