"""Losses on pairs of sequences: a term for each pair, divided once by the pairs of the whole optimizer step.

The pairs of a micro-batch lie next to each other: its sequences 0 and 1 are a chosen and a rejected one, 2 and 3 the
next pair. Behind them there may be one sequence without trained tokens, which fills the micro-batch up; an empty
micro-batch is that alone, and its loss is 0. What stands where loss_mask is False is never looked at.

Each returns (loss, metrics). Loss, metrics and gradients of micro-batches and ranks add up. Metrics, as sums over
pairs: `chosen_reward` and `rejected_reward`; `margin`, the difference of the two; `accuracy`, pairs of a positive
margin, those of margin 0 counting half. The suffix _N stands for the pairs of the micro-batch.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid

from megarl.algorithms.losses import masked
from megarl.algorithms.policy_losses import sequence_sums
from megarl.sample import Batch

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def dpo_loss(logprobs: torch.Tensor, batch: Batch, beta: float, label_smoothing: float = 0.0) -> Loss:
    """-log sigmoid(margin), the reward of a sequence being beta * log(p / p_reference), summed over its trained tokens.

    DPO (arXiv:2305.18290), equation 7. `label_smoothing` e is the share of pairs taken to be the wrong way round:
    -(1 - e) log sigmoid(margin) - e log sigmoid(-margin), the conservative DPO of Mitchell, "A note on DPO with noisy
    preferences & relationship to IPO", https://ericmitchell.ai/cdpo.pdf, equation 3.
    `logprobs`: [T] float32, aligned with batch.token_ids.
    """
    chosen_N, rejected_N = _pair_sums(beta * _log_ratios(logprobs, batch), batch)
    margins_N = chosen_N - rejected_N
    losses_N = -(1 - label_smoothing) * logsigmoid(margins_N) - label_smoothing * logsigmoid(-margins_N)
    return _mean(losses_N, batch), _metrics(chosen_N, rejected_N)


def ipo_loss(logprobs: torch.Tensor, batch: Batch, beta: float) -> Loss:
    """(h - 1 / (2 beta))^2 with h = log(p / p_reference) of the chosen sequence less that of the rejected one.

    IPO (arXiv:2310.12036), equation 17, its tau being beta. The log-ratios are sums over a sequence's trained tokens,
    the paper's; libraries, TRL among them, often take means per token, for which beta has another scale.
    `logprobs`: [T] float32, aligned with batch.token_ids. Rewards are beta * log(p / p_reference), as in dpo_loss.
    """
    chosen_N, rejected_N = _pair_sums(_log_ratios(logprobs, batch), batch)
    losses_N = (chosen_N - rejected_N - 1 / (2 * beta)).square()
    return _mean(losses_N, batch), _metrics(beta * chosen_N, beta * rejected_N)


def bradley_terry_loss(values: torch.Tensor, batch: Batch, center: float = 0.0) -> Loss:
    """-log sigmoid(r_chosen - r_rejected) + center * (r_chosen + r_rejected)^2, for a reward model.

    InstructGPT (arXiv:2203.02155), equation 1, with one pair per prompt. It leaves a constant per prompt open, which
    `center` draws to 0: Eisenstein et al. (arXiv:2312.09244), section 2.1, equation 2.
    `values`: [T] float32, aligned with batch.token_ids. A sequence has one trained token, appended behind its end: the
    value there is that of all tokens before it, the sequence's reward.
    """
    assert batch.num_loss_tokens == batch.num_sequences, "a sequence has more than one token that scores it"
    chosen_N, rejected_N = _pair_sums(values, batch)
    losses_N = center * (chosen_N + rejected_N).square() - logsigmoid(chosen_N - rejected_N)
    return _mean(losses_N, batch), _metrics(chosen_N, rejected_N)


PREFERENCE_LOSSES: dict[str, Callable[..., Loss]] = {
    "dpo": dpo_loss,
    "ipo": ipo_loss,
    "reward_model": bradley_terry_loss,
}


def _log_ratios(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[T] log(p / p_reference) of each token."""
    assert batch.ref_logprobs is not None, "the batch has no ref_logprobs"
    return logprobs - batch.ref_logprobs


def _pair_sums(values_T: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over the trained tokens of the chosen and of the rejected sequences, [N] each."""
    counts_B = sequence_sums(batch.loss_mask.long(), batch)
    end = len(counts_B) // 2 * 2  # a last sequence without a partner is a filler
    in_pairs = counts_B[:end].all() and not counts_B[end:].any()
    assert in_pairs, f"sequences of {counts_B.tolist()} trained tokens are no pairs"
    return sequence_sums(masked(values_T, batch.loss_mask), batch)[:end].view(-1, 2).unbind(1)


def _mean(losses_N: torch.Tensor, batch: Batch) -> torch.Tensor:
    """This micro-batch's share of the mean over the pairs of the step."""
    return losses_N.sum() / max(batch.num_sequences // 2, 1)  # a step with nothing to train: 0, not 0/0


def _metrics(chosen_N: torch.Tensor, rejected_N: torch.Tensor) -> dict[str, torch.Tensor]:
    margins_N = (chosen_N - rejected_N).detach()
    return {
        "chosen_reward": chosen_N.detach().sum(),
        "rejected_reward": rejected_N.detach().sum(),
        "margin": margins_N.sum(),
        "accuracy": torch.heaviside(margins_N, margins_N.new_tensor(0.5)).sum(),
    }
