"""Losses: sums of per-token terms, divided once by the denominators of the whole optimizer step.

Each returns (loss, metrics). Loss and metrics of micro-batches and ranks add up, and so do gradients; the trainer
divides a summed metric by num_loss_tokens.
"""

import torch

from megarl.algorithms.kl import MAX_LOG_RATIO, k3
from megarl.sample import Batch


def policy_loss(
    logprobs: torch.Tensor,
    batch: Batch,
    clip_low: float,
    clip_high: float,
    loss_aggregation: str,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
    entropy: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective, negated: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with
    r = exp(logprobs - old_logprobs), plus kl_coefficient * k3(policy, reference), minus entropy_coefficient * `entropy`
    ([T] float32, its equation 9).

    PPO (arXiv:1707.06347) equation 7; clip_high > clip_low is "clip-higher", DAPO (arXiv:2503.14476) equation 10.
    `logprobs`: [T] float32, aligned with batch.token_ids; what it holds where loss_mask is False is never looked at.
    log r is clamped to +-20, where its gradient ends. Metrics, as sums over trained tokens: `clipped`, tokens whose
    gradient the clip stopped; `kl_old`, k3 of KL(old || policy); `kl_ref`, k3 of KL(policy || reference), if there
    are ref_logprobs.
    """
    assert batch.old_logprobs is not None, "the batch has no old_logprobs"
    assert batch.advantages is not None, "the batch has no advantages"
    assert entropy_coefficient == 0 or entropy is not None, "entropy_coefficient > 0 without entropies"
    assert kl_coefficient == 0 or batch.ref_logprobs is not None, "kl_coefficient > 0 without ref_logprobs"
    mask = batch.loss_mask
    logprobs = _masked(logprobs, mask)
    old_logprobs = _masked(batch.old_logprobs, mask)
    advantages = _masked(batch.advantages, mask)

    ratio = torch.exp(torch.clamp(logprobs - old_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages
    token_losses_T = -torch.minimum(unclipped, clipped)
    metrics = {
        "clipped": (clipped < unclipped).sum().float(),
        "kl_old": k3(old_logprobs, logprobs.detach()).sum(),
    }
    if batch.ref_logprobs is not None:
        kl_T = k3(logprobs, _masked(batch.ref_logprobs, mask))
        metrics["kl_ref"] = kl_T.detach().sum()
        if kl_coefficient > 0:
            token_losses_T = token_losses_T + kl_coefficient * kl_T
    if entropy_coefficient > 0:
        token_losses_T = token_losses_T - entropy_coefficient * _masked(entropy, mask)
    return aggregate(token_losses_T, batch, loss_aggregation), metrics


def sft_loss(logprobs: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood, mean over the trained tokens of the step. `logprobs`: [T] float32, as in policy_loss.
    Metric, as a sum: `nll`."""
    token_losses_T = -_masked(logprobs, batch.loss_mask)
    return aggregate(token_losses_T, batch, "token_mean"), {"nll": token_losses_T.detach().sum()}


def aggregate(token_losses_T: torch.Tensor, batch: Batch, loss_aggregation: str) -> torch.Tensor:
    """This micro-batch's share of the step's loss. The terms must be 0 where loss_mask is False.

    token_mean: every trained token of the step weighs the same. sequence_mean: every sequence does; its weight is
    spread over its own trained tokens, which all lie in this batch, as no sequence is split.
    """
    if loss_aggregation == "token_mean":
        return token_losses_T.sum() / max(batch.num_loss_tokens, 1)  # a step with nothing to train: 0, not 0/0
    if loss_aggregation == "sequence_mean":
        counts_B = torch.zeros(len(batch.cu_seqlens) - 1, dtype=token_losses_T.dtype, device=token_losses_T.device)
        counts_B = counts_B.index_add(0, batch.sequence_ids, batch.loss_mask.to(token_losses_T.dtype))
        weights_T = 1 / counts_B.clamp(min=1)[batch.sequence_ids]  # a sequence without trained tokens has terms 0
        return (token_losses_T * weights_T).sum() / max(batch.num_sequences, 1)
    raise ValueError(f"loss_aggregation {loss_aggregation!r}: token_mean or sequence_mean")


def _masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """0 where the mask is False, before any arithmetic: a NaN there reaches neither value nor gradient."""
    return torch.where(mask_T, values_T, 0.0)
