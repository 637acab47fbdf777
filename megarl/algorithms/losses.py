"""Losses: sums of per-token terms, divided once by the denominators of the whole optimizer step.

Each returns (loss, metrics). Loss and metrics of micro-batches and ranks add up, and so do gradients; the trainer
divides a summed metric by num_loss_tokens.
"""

import torch

from megarl.algorithms.kl import KL_ESTIMATORS, importance_weighted, k3
from megarl.algorithms.policy_losses import POLICY_LOSSES, Limits, sequence_sums
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
    kind: str = "ppo",
    dual_clip: float = Limits.dual_clip,
    tau_positive: float = Limits.tau_positive,
    tau_negative: float = Limits.tau_negative,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = False,
    aggregation_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The terms of POLICY_LOSSES[kind], times batch.weights if there are any, plus kl_coefficient * KL(policy ||
    reference) by KL_ESTIMATORS[kl_estimator], minus entropy_coefficient * `entropy` ([T] float32, PPO's equation 9).

    The weights correct the policy term alone; a token of weight 0 still counts in the denominators.
    `logprobs`: [T] float32, aligned with batch.token_ids; what it holds where loss_mask is False is never looked at.
    Metrics, as sums over trained tokens: `clipped`, tokens where the clip was active; `kl_old`, k3 of KL(old ||
    policy).
    """
    assert batch.old_logprobs is not None, "the batch has no old_logprobs"
    assert batch.advantages is not None, "the batch has no advantages"
    assert entropy_coefficient == 0 or entropy is not None, "entropy_coefficient > 0 without entropies"
    assert kl_coefficient == 0 or batch.ref_logprobs is not None, "kl_coefficient > 0 without ref_logprobs"
    mask = batch.loss_mask
    logprobs = masked(logprobs, mask)
    old_logprobs = masked(batch.old_logprobs, mask)
    advantages = masked(batch.advantages, mask)

    limits = Limits(clip_low, clip_high, dual_clip, tau_positive, tau_negative)
    token_losses_T, clipped_T = POLICY_LOSSES[kind](logprobs, old_logprobs, advantages, batch, limits)
    if batch.weights is not None:
        token_losses_T = token_losses_T * masked(batch.weights, mask)
    metrics = {"clipped": clipped_T.sum().float(), "kl_old": k3(old_logprobs, logprobs.detach()).sum()}
    if kl_coefficient > 0:
        kl_T = KL_ESTIMATORS[kl_estimator](logprobs, masked(batch.ref_logprobs, mask))
        if kl_importance_weighted:
            kl_T = importance_weighted(kl_T, logprobs, old_logprobs)
        token_losses_T = token_losses_T + kl_coefficient * kl_T
    if entropy_coefficient > 0:
        token_losses_T = token_losses_T - entropy_coefficient * masked(entropy, mask)
    return aggregate(token_losses_T, batch, loss_aggregation, aggregation_length), metrics


def sft_loss(
    logprobs: torch.Tensor, batch: Batch, loss_aggregation: str = "token_mean", aggregation_length: int | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Negative log-likelihood of the trained tokens. `logprobs`: as in policy_loss. Metric, as a sum: `nll`."""
    token_losses_T = -masked(logprobs, batch.loss_mask)
    loss = aggregate(token_losses_T, batch, loss_aggregation, aggregation_length)
    return loss, {"nll": token_losses_T.detach().sum()}


def aggregate(
    token_losses_T: torch.Tensor, batch: Batch, loss_aggregation: str, aggregation_length: int | None = None
) -> torch.Tensor:
    """This micro-batch's share of the step's loss. The terms must be 0 where loss_mask is False.

    token_mean: every trained token of the step weighs the same. sequence_mean: every sequence does; its weight is
    spread over its own trained tokens, which all lie in this batch, as no sequence is split. sequence_mean_token_sum:
    the sums of the sequences, divided by their number. constant: that divided by `aggregation_length` (tokens) too, the
    same for every step, Dr. GRPO (arXiv:2503.20783), section 3.2. Sequences without trained tokens are not counted.
    """
    num_sequences = max(batch.num_sequences, 1)  # a step with nothing to train: 0, not 0/0
    if loss_aggregation == "token_mean":
        return token_losses_T.sum() / max(batch.num_loss_tokens, 1)
    if loss_aggregation == "sequence_mean":
        counts_B = sequence_sums(batch.loss_mask.to(token_losses_T.dtype), batch)
        weights_T = 1 / counts_B.clamp(min=1)[batch.sequence_ids]  # a sequence without trained tokens has terms 0
        return (token_losses_T * weights_T).sum() / num_sequences
    if loss_aggregation == "sequence_mean_token_sum":
        return token_losses_T.sum() / num_sequences
    if loss_aggregation == "constant":
        if not aggregation_length or aggregation_length < 0:
            raise ValueError(f"aggregation_length {aggregation_length}: loss_aggregation constant needs one above 0")
        return token_losses_T.sum() / (num_sequences * aggregation_length)
    choices = "token_mean, sequence_mean, sequence_mean_token_sum or constant"
    raise ValueError(f"loss_aggregation {loss_aggregation!r}: {choices}")


def masked(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """0 where the mask is False, before any arithmetic: a NaN there reaches neither value nor gradient."""
    return torch.where(mask_T, values_T, 0.0)
