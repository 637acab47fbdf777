"""Log-probs and entropy of vocabulary-parallel logits, and their gradient, which overwrites the logits.

No second [T, V] tensor ever exists: Triton kernels on a GPU, torch operations chunk by chunk elsewhere. Overwriting is
sound because Megatron's output layer saves its input and weight, not its output. An operation that did save the logits
raises in its backward: autograd checks their version. So does a second backward.
"""

import torch

from megarl.engine import parallel

CHUNK_TOKENS = 1024


def logprobs_and_entropy(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    vocab_size: int,
    temperature: float,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(target) under softmax(logits / temperature) and the entropy: the first differentiable in the logits, the
    second only with `entropy_gradient`. The backward leaves the gradient where the logits were.

    logits_TV: [T, V/tp] this rank's columns, padding included; targets_T: [T] global token ids; `vocab_size` without
    padding. Columns at or above it count as probability 0. Returns [T] float32 in nats, equal on all TP ranks.
    """
    assert with_entropy or not entropy_gradient, "the gradient of an entropy that is not computed"
    assert not (logits_TV.requires_grad and logits_TV.is_leaf), "the gradient would overwrite a parameter"
    return _VocabParallelLogprob.apply(logits_TV, targets_T, vocab_size, temperature, with_entropy, entropy_gradient)


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, targets_T, vocab_size, temperature, with_entropy, entropy_gradient):
        first_column = parallel.tensor_parallel_rank() * logits_TV.shape[1]
        num_columns = max(0, min(logits_TV.shape[1], vocab_size - first_column))
        columns_T = targets_T - first_column
        read, _ = _implementation(logits_TV)
        largest_T, sums_NT = read(logits_TV, columns_T, num_columns, temperature, with_entropy)
        overall_T = parallel.tensor_parallel_max_(largest_T.clone())
        sums_NT[1:] *= (largest_T - overall_T).exp()
        target_T, sum_T, *weighted_T = parallel.tensor_parallel_sum_(sums_NT)
        log_sum_T = sum_T.log() + overall_T
        entropy_T = log_sum_T - weighted_T[0] / sum_T if with_entropy else None
        if with_entropy and not entropy_gradient:
            ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(logits_TV, columns_T, log_sum_T, entropy_T if entropy_gradient else None)
        ctx.num_columns, ctx.temperature = num_columns, temperature
        return target_T - log_sum_T, entropy_T

    @staticmethod
    def backward(ctx, grad_logprobs_T, grad_entropy_T):
        if torch.is_grad_enabled():
            raise RuntimeError("log-probs cannot be differentiated twice: the gradient overwrites the logits")
        logits_TV, columns_T, log_sum_T, entropy_T = ctx.saved_tensors
        gradient_TV = logits_TV.detach()
        _, write_ = _implementation(logits_TV)
        grad_entropy_T = None if entropy_T is None else grad_entropy_T
        place = (columns_T, ctx.num_columns, ctx.temperature)
        write_(gradient_TV, *place, log_sum_T, entropy_T, grad_logprobs_T, grad_entropy_T)
        torch.autograd.graph.increment_version(gradient_TV)  # a kernel's writes are invisible to autograd
        return gradient_TV, None, None, None, None, None


def _implementation(logits_TV):
    if not logits_TV.is_cuda:
        return row_statistics, write_gradient_
    from megarl.engine import logprob_kernels  # Triton is not part of every torch

    return logprob_kernels.row_statistics, logprob_kernels.write_gradient_


def row_statistics(
    logits_TV: torch.Tensor, columns_T: torch.Tensor, num_columns: int, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest [T], sums [2 or 3, T]) of x = logits / temperature over the first `num_columns` columns.

    The sums: x at `columns_T` (0 where another rank has it), exp(x - largest), and `with_entropy` exp(x - largest) * x.
    """
    num_rows = logits_TV.shape[0]
    largest_T = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=logits_TV.device)
    sums_NT = torch.zeros(3 if with_entropy else 2, num_rows, dtype=torch.float32, device=logits_TV.device)
    columns_T, here_T = _local(columns_T, num_columns)
    for rows in _chunks(num_rows if num_columns else 0):
        scaled = logits_TV[rows, :num_columns].float() / temperature
        largest_T[rows] = scaled.amax(-1)
        sums_NT[0, rows] = scaled.gather(1, columns_T[rows, None]).squeeze(1).masked_fill_(~here_T[rows], 0.0)
        exponentials = (scaled - largest_T[rows, None]).exp_()
        sums_NT[1, rows] = exponentials.sum(-1)
        if with_entropy:
            sums_NT[2, rows] = exponentials.mul_(scaled).sum(-1)
    return largest_T, sums_NT


def write_gradient_(
    logits_TV: torch.Tensor,
    columns_T: torch.Tensor,
    num_columns: int,
    temperature: float,
    log_sum_T: torch.Tensor,
    entropy_T: torch.Tensor | None,
    grad_logprobs_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
) -> None:
    """Overwrite the logits with the loss's gradient in them, given that in the log-probs and perhaps the entropy H.

    With x = logits / temperature, p = softmax(x): d log p_t / dx_j = [j = t] - p_j and dH / dx_j = -p_j (log p_j + H).
    """
    columns_T, here_T = _local(columns_T, num_columns)
    logits_TV[:, num_columns:] = 0
    for rows in _chunks(logits_TV.shape[0] if num_columns else 0):
        logprobs = logits_TV[rows, :num_columns].float() / temperature - log_sum_T[rows, None]
        gradient = logprobs.exp().mul_(-grad_logprobs_T[rows, None])
        if entropy_T is not None:
            surprises = logprobs.exp() * (logprobs + entropy_T[rows, None])
            gradient -= surprises.mul_(grad_entropy_T[rows, None])
        gradient.scatter_add_(1, columns_T[rows, None], (grad_logprobs_T * here_T)[rows, None])
        logits_TV[rows, :num_columns] = gradient.div_(temperature)


def _local(columns_T, num_columns):
    """The columns with 0 for those that this rank does not have, and which it has."""
    here_T = (columns_T >= 0) & (columns_T < num_columns)
    return columns_T.masked_fill(~here_T, 0), here_T


def _chunks(num_rows):
    return [slice(start, start + CHUNK_TOKENS) for start in range(0, num_rows, CHUNK_TOKENS)]
