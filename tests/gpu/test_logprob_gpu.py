"""The Triton kernels compiled for the device, against float64."""

import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.gpu
ROWS, VOCAB_SIZE, COLUMNS, TEMPERATURE = 300, 151_665, 151_936, 0.7  # Qwen2.5: tokens, and rows of its output layer


def compare(rank, dtype):
    """(errors of log-probs and entropy, gradient's error over its rounding, its largest padded value, what a second
    backward says)."""
    from megarl.engine.logprob import logprobs_and_entropy

    generator = torch.Generator("cuda").manual_seed(5)
    leaf = (3 * torch.randn(ROWS, COLUMNS, device="cuda", generator=generator)).to(dtype).requires_grad_()
    targets_T = torch.randint(0, VOCAB_SIZE, (ROWS,), device="cuda", generator=generator)
    weights = torch.randn(2, ROWS, device="cuda", generator=generator)
    weights[:, ::3] = 0

    plain = leaf.detach()[:, :VOCAB_SIZE].double().requires_grad_()
    expected = (plain / TEMPERATURE).log_softmax(-1)
    expected_logprobs_T = expected.gather(1, targets_T[:, None]).squeeze(1)
    expected_entropy_T = -(expected.exp() * expected).sum(-1)
    (weights[0] * expected_logprobs_T + weights[1] * expected_entropy_T).sum().backward()

    arguments = (leaf * 1, targets_T, VOCAB_SIZE, TEMPERATURE)
    logprobs_T, entropy_T = logprobs_and_entropy(*arguments, with_entropy=True, entropy_gradient=True)
    loss = (weights[0] * logprobs_T + weights[1] * entropy_T).sum()
    loss.backward(retain_graph=True)
    gradient_TV = leaf.grad[:, :VOCAB_SIZE].double()
    allowed = 1e-6 + plain.grad.abs() * (2**-8 if dtype == torch.bfloat16 else 1e-4)
    try:
        loss.backward()
        message = "nothing"
    except RuntimeError as error:
        message = str(error)
    return (
        (logprobs_T - expected_logprobs_T).abs().max().item(),
        (entropy_T - expected_entropy_T).abs().max().item(),
        ((gradient_TV - plain.grad).abs() / allowed).max().item(),
        leaf.grad[:, VOCAB_SIZE:].abs().max().item(),
        message,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_equal_float64_and_a_second_backward_raises(dtype):
    [(logprob_error, entropy_error, gradient_error, padded_gradient, message)] = run_ranks(compare, 1, dtype)
    assert logprob_error < 1e-4 and entropy_error < 1e-4
    assert gradient_error < 1 and padded_gradient == 0
    assert "modified by an inplace operation" in message
