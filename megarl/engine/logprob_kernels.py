"""Triton kernels behind `logprob`: the logits are read once forward, read and overwritten once backward.

A program owns a row. Rows are addressed in 64 bits ([T, V] exceeds 2^31 elements), columns within a row in 32.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
NUM_WARPS = 4  # 32 logits a thread: four 16-byte bfloat16 loads in flight
LOWEST = tl.constexpr(-3.0e38)  # the maximum of no logits: finite, for -inf - -inf is NaN


def row_statistics(
    logits_TV: torch.Tensor, columns_T: torch.Tensor, num_columns: int, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `logprob.row_statistics`."""
    num_rows, width = logits_TV.shape
    assert logits_TV.stride(1) == 1, f"the columns must be adjacent, the strides are {logits_TV.stride()}"
    largest_T = torch.empty(num_rows, dtype=torch.float32, device=logits_TV.device)
    sums_NT = torch.empty(3 if with_entropy else 2, num_rows, dtype=torch.float32, device=logits_TV.device)
    if num_rows:
        _row_statistics_kernel[(num_rows,)](
            logits_TV,
            columns_T,
            largest_T,
            sums_NT,
            num_rows,
            width,
            num_columns,
            logits_TV.stride(0),
            1 / temperature,
            WITH_ENTROPY=with_entropy,
            BLOCK=BLOCK,
            GROUP=16 // logits_TV.element_size(),
            num_warps=NUM_WARPS,
        )
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
    """See `logprob.write_gradient_`. Rows without a gradient are zeroed unread."""
    num_rows, width = logits_TV.shape
    if num_rows:
        _gradient_kernel[(num_rows,)](
            logits_TV,
            columns_T,
            log_sum_T,
            entropy_T,
            grad_logprobs_T.contiguous(),  # the gradient of a sum is one number with stride 0
            None if grad_entropy_T is None else grad_entropy_T.contiguous(),
            width,
            num_columns,
            logits_TV.stride(0),
            1 / temperature,
            WITH_ENTROPY=entropy_T is not None,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


@triton.jit
def _row_statistics_kernel(
    logits,
    columns,
    largest,
    sums,
    num_rows,
    width,
    num_columns,
    row_stride,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    # The logits of one 16-byte load share a running maximum: one thread holds them, so the loop exchanges nothing.
    groups = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    peak = tl.full([BLOCK // GROUP], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // GROUP], tl.float32)
    weighted = tl.zeros([BLOCK // GROUP], tl.float32)
    for start in range(0, num_columns, BLOCK):
        offsets = start + groups
        # Masked by the width, a multiple of 16 where the vocabulary may not be one: the loads stay 16 bytes wide.
        x = tl.load(logits + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        x = tl.where(offsets < num_columns, x, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(x, axis=1))
        shrink = tl.exp((peak - new_peak) * inverse_temperature)
        exponentials = tl.exp((x - new_peak[:, None]) * inverse_temperature)
        total = total * shrink + tl.sum(exponentials, axis=1)
        if WITH_ENTROPY:
            products = tl.where(exponentials > 0, exponentials * x, 0.0)  # 0 * -inf is NaN
            weighted = weighted * shrink + tl.sum(products, axis=1)
        peak = new_peak
    row_peak = tl.max(peak, axis=0)
    shrink = tl.exp((peak - row_peak) * inverse_temperature)
    tl.store(largest + row, row_peak * inverse_temperature)
    column = tl.load(columns + row)
    target = tl.load(logits + column, mask=(column >= 0) & (column < num_columns), other=0.0).to(tl.float32)
    tl.store(sums + row, target * inverse_temperature)
    tl.store(sums + num_rows + row, tl.sum(total * shrink, axis=0))
    if WITH_ENTROPY:
        tl.store(sums + 2 * num_rows + row, tl.sum(weighted * shrink, axis=0) * inverse_temperature)


@triton.jit
def _gradient_kernel(
    logits,
    columns,
    log_sums,
    entropies,
    grad_logprobs,
    grad_entropies,
    width,
    num_columns,
    row_stride,
    inverse_temperature,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    grad_logprob = tl.load(grad_logprobs + row)
    without_gradient = grad_logprob == 0
    if WITH_ENTROPY:
        entropy = tl.load(entropies + row)
        grad_entropy = tl.load(grad_entropies + row)
        without_gradient = without_gradient & (grad_entropy == 0)
    if without_gradient:
        for start in range(0, width, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            tl.store(logits + offsets, tl.zeros([BLOCK], logits.dtype.element_ty), mask=offsets < width)
    else:
        log_sum = tl.load(log_sums + row)
        column = tl.load(columns + row)
        for start in range(0, width, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            logprobs = x * inverse_temperature - log_sum
            probabilities = tl.where(offsets < num_columns, tl.exp(logprobs), 0.0)
            gradient = -grad_logprob * probabilities
            if WITH_ENTROPY:
                surprises = probabilities * (logprobs + entropy)
                gradient -= tl.where(probabilities > 0, grad_entropy * surprises, 0.0)
            gradient += tl.where(offsets == column, grad_logprob, 0.0)
            gradient *= inverse_temperature
            tl.store(logits + offsets, gradient.to(logits.dtype.element_ty), mask=offsets < width)
