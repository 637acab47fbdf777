"""Log-probs and entropy of vocabulary-parallel logits, chunk by chunk: no [T, V] float32 tensor ever exists."""

import torch

from megarl.engine import parallel

CHUNK_TOKENS = 1024


def logprobs_and_entropy(
    logits_TV: torch.Tensor, targets_T: torch.Tensor, vocab_size: int, temperature: float, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) under softmax(logits / temperature), differentiable in the logits, and the entropy, which is not.

    logits_TV: [T, V/tp] this rank's columns, padding included; targets_T: [T] global token ids; `vocab_size` without
    padding. Columns at or above it count as probability 0. Returns [T] float32 in nats, equal on all TP ranks.
    """
    return _VocabParallelLogprob.apply(logits_TV, targets_T, vocab_size, temperature, with_entropy)


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, targets_T, vocab_size, temperature, with_entropy):
        first_column = parallel.tensor_parallel_rank() * logits_TV.shape[1]
        num_columns = max(0, min(logits_TV.shape[1], vocab_size - first_column))
        columns_T, here_T = _local_targets(targets_T, first_column, num_columns)
        log_sums, target_logits, expected_logits = [], [], []
        for rows in _chunks(logits_TV.shape[0]):
            scaled = logits_TV[rows, :num_columns].float() / temperature
            largest = scaled.amax(-1) if num_columns else scaled.new_full((scaled.shape[0],), -torch.inf)
            largest = parallel.tensor_parallel_max_(largest)
            picked = scaled.gather(1, columns_T[rows, None]).squeeze(1) if num_columns else torch.zeros_like(largest)
            exponentials = (scaled - largest[:, None]).exp_()
            sums = [exponentials.sum(-1), picked.masked_fill(~here_T[rows], 0.0)]
            if with_entropy:
                sums.append((exponentials * scaled).sum(-1))
            sums = parallel.tensor_parallel_sum_(torch.stack(sums))
            log_sums.append(sums[0].log() + largest)
            target_logits.append(sums[1])
            if with_entropy:
                expected_logits.append(sums[2] / sums[0])
        log_sum_T = torch.cat(log_sums)
        ctx.save_for_backward(logits_TV, columns_T, here_T, log_sum_T)
        ctx.num_columns, ctx.temperature = num_columns, temperature
        entropy_T = log_sum_T - torch.cat(expected_logits) if with_entropy else None
        if with_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return torch.cat(target_logits) - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        logits_TV, columns_T, here_T, log_sum_T = ctx.saved_tensors
        grad_TV = torch.zeros_like(logits_TV)
        if ctx.num_columns:
            for rows in _chunks(logits_TV.shape[0]):
                scaled = logits_TV[rows, : ctx.num_columns].float() / ctx.temperature
                grad = (scaled - log_sum_T[rows, None]).exp_().neg_()  # d logp / d logit = one_hot - p
                grad.scatter_add_(1, columns_T[rows, None], here_T[rows, None].float())
                grad_TV[rows, : ctx.num_columns] = grad.mul_(grad_T[rows, None] / ctx.temperature).to(grad_TV.dtype)
        return grad_TV, None, None, None, None


def _local_targets(targets_T, first_column, num_columns):
    """Each target's column on this rank (0 where it is another rank's), and whether it is this rank's."""
    columns_T = targets_T - first_column
    here_T = (columns_T >= 0) & (columns_T < num_columns)
    return columns_T.masked_fill(~here_T, 0), here_T


def _chunks(num_rows):
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, num_rows, CHUNK_TOKENS)]
