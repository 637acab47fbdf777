"""Both implementations against float64: torch's, and the Triton kernels in Triton's interpreter, on 1 and 2 ranks."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import ranks
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 7
IMPLEMENTATIONS = [(name, size) for name in ("torch", "triton") for size in (1, 2)]


@dataclass(frozen=True)
class Case:
    """`columns` logits in a row of which `vocab_size` are no padding."""

    vocab_size: int
    columns: int
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    entropy_gradient: bool = False
    fixed_targets: tuple[int, ...] = ()

    def inputs(self):
        """(logits with +100 in the padding, which would win every softmax, targets, gradients of both results)."""
        generator = torch.Generator().manual_seed(3)
        logits_TV = (3 * torch.randn(ROWS, self.columns, generator=generator)).to(self.dtype)
        logits_TV[:, self.vocab_size :] = 100.0
        targets_T = torch.randint(0, self.vocab_size, (ROWS,), generator=generator)
        targets_T[: len(self.fixed_targets)] = torch.tensor(self.fixed_targets)
        grad_logprobs_T = torch.tensor([1.0, -2.0, 0.0, 0.0, 3.0, 0.5, 0.0])
        grad_entropy_T = torch.tensor([0.0, 1.5, -1.0, 0.0, 0.0, -2.0, 0.0]) * self.entropy_gradient
        return logits_TV, targets_T, grad_logprobs_T, grad_entropy_T


CASES = {
    # 101 tokens in 256 columns: with two ranks the second holds padding alone.
    "padding": Case(101, 256, fixed_targets=(0, 100, 7, 63, 64)),
    "temperature": Case(101, 256, temperature=0.7),
    "entropy": Case(101, 256, temperature=0.7, entropy_gradient=True),
    "both ranks have tokens": Case(170, 180, temperature=1.3, entropy_gradient=True, fixed_targets=(89, 90, 169, 0)),
    "bfloat16": Case(170, 180, torch.bfloat16),
    "bfloat16 entropy": Case(170, 180, torch.bfloat16, temperature=0.7, entropy_gradient=True),
}


def shard_of(rank, logits_TV):
    """(leaf, a wider output whose rows end in 7s, its left part): as Megatron's, a view that is not contiguous."""
    from megarl.engine import parallel

    leaf = logits_TV.chunk(parallel.tensor_parallel_size(), dim=1)[rank].clone().requires_grad_()
    output = torch.nn.functional.pad(leaf, (0, 16), value=7.0)[None]
    return leaf, output, output.squeeze(0)[:, : leaf.shape[1]]


def on_rank(rank, implementation):
    from megarl.engine import logprob, logprob_kernels

    logprob.CHUNK_TOKENS, logprob_kernels.BLOCK = 2, 64
    if implementation == "triton":
        logprob._implementation = lambda _: (logprob_kernels.row_statistics, logprob_kernels.write_gradient_)
    return {name: run_case(rank, case) for name, case in CASES.items()}, misuses(rank), nan_in_a_masked_row(rank)


def run_case(rank, case):
    from megarl.engine.logprob import logprobs_and_entropy

    logits_TV, targets_T, grad_logprobs_T, grad_entropy_T = case.inputs()
    leaf, output, shard = shard_of(rank, logits_TV)
    arguments = (shard, targets_T, case.vocab_size, case.temperature)
    alone_T, nothing = logprobs_and_entropy(*arguments)
    logprobs_T, entropy_T = logprobs_and_entropy(*arguments, with_entropy=True, entropy_gradient=case.entropy_gradient)
    assert nothing is None and alone_T.equal(logprobs_T) and entropy_T.requires_grad == case.entropy_gradient
    loss = (grad_logprobs_T * logprobs_T + grad_entropy_T * entropy_T).sum()
    loss.backward()
    assert (output[..., leaf.shape[1] :] == 7.0).all()
    assert shard.equal(leaf.grad)  # in place
    return logprobs_T.detach().numpy(), entropy_T.detach().numpy(), leaf.grad.float().numpy()


def misuses(rank):
    """What is said to a second backward, to a double one, to another reader of the logits, and about a leaf."""
    from megarl.engine.logprob import logprobs_and_entropy

    logits_TV, targets_T, *_ = CASES["padding"].inputs()

    def logprobs_sum(shard):
        return logprobs_and_entropy(shard, targets_T, 101, 1.0)[0].sum()

    def twice():
        total = logprobs_sum(shard_of(rank, logits_TV)[2])
        total.backward(retain_graph=True)
        total.backward()

    def double():
        leaf, _, shard = shard_of(rank, logits_TV)
        torch.autograd.grad(logprobs_sum(shard), leaf, create_graph=True)

    def another_reader():
        _, _, shard = shard_of(rank, logits_TV)
        (shard.square().sum() + logprobs_sum(shard)).backward()

    def leaf():
        logprobs_sum(shard_of(rank, logits_TV)[0])

    messages = {}
    for misuse in (twice, double, another_reader, leaf):
        try:
            misuse()
        except (RuntimeError, AssertionError) as error:
            messages[misuse.__name__] = str(error)
    return messages


def nan_in_a_masked_row(rank):
    from megarl.engine.logprob import logprobs_and_entropy

    logits_TV, targets_T, grad_logprobs_T, _ = CASES["padding"].inputs()
    logits_TV[2] = torch.nan  # its gradient is 0
    leaf, _, shard = shard_of(rank, logits_TV)
    logprobs_T, _ = logprobs_and_entropy(shard, targets_T, 101, 1.0)
    logprobs_T.backward(grad_logprobs_T)
    return logprobs_T.detach().numpy(), leaf.grad.numpy()


def run_all():
    """In a process that imported Triton as its interpreter: {implementation: what each rank returns}."""
    from megarl.engine import logprob, logprob_kernels  # noqa: F401  so that the forked ranks need not

    ranks.CONTEXT = multiprocessing.get_context("fork")
    return {(name, size): ranks.run_ranks(on_rank, size, name, tensor_parallel=size) for name, size in IMPLEMENTATIONS}


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        patch.setenv("TRITON_INTERPRET", "1")  # read where Triton is first imported
        return process.submit(run_all).result(timeout=120)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_a_plain_softmax_and_ignores_padded_columns(results, implementation, name):
    case = CASES[name]
    logits_TV, targets_T, grad_logprobs_T, grad_entropy_T = case.inputs()
    plain = logits_TV[:, : case.vocab_size].double().requires_grad_()
    expected = (plain / case.temperature).log_softmax(-1)
    logprobs_T = expected[torch.arange(ROWS), targets_T]
    entropy_T = -(expected.exp() * expected).sum(-1)
    (grad_logprobs_T * logprobs_T + grad_entropy_T * entropy_T).sum().backward()

    found = [cases[name] for cases, _, _ in results[implementation]]
    for found_logprobs_T, found_entropy_T, _ in found:
        torch.testing.assert_close(torch.tensor(found_logprobs_T).double(), logprobs_T.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(found_entropy_T).double(), entropy_T.detach(), atol=1e-5, rtol=0)
    gradient_TV = torch.cat([torch.tensor(rank[2]) for rank in found], dim=1).double()
    rounding = 2**-7 if case.dtype == torch.bfloat16 else 0  # Triton's interpreter truncates
    torch.testing.assert_close(gradient_TV[:, : case.vocab_size], plain.grad, atol=1e-5, rtol=rounding)
    assert (gradient_TV[:, case.vocab_size :] == 0).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_what_would_read_the_overwritten_logits_raises(results, implementation):
    for _, messages, _ in results[implementation]:
        assert "modified by an inplace operation" in messages["twice"]
        assert "cannot be differentiated twice" in messages["double"]
        assert "modified by an inplace operation" in messages["another_reader"]
        assert "overwrite a parameter" in messages["leaf"]


@pytest.mark.parametrize("implementation", [("triton", 1), ("triton", 2)], ids=str)
def test_the_kernels_zero_rows_without_a_gradient_unread(results, implementation):
    for _, _, (logprobs_T, gradient_TV) in results[implementation]:
        assert torch.tensor(logprobs_T).isnan().tolist() == [row == 2 for row in range(ROWS)]
        assert (gradient_TV[2] == 0).all()


class LargestFloat32(TorchDispatchMode):
    """The number of elements of the largest float32 tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.largest = max(self.largest, tensor.numel())
        return result


def largest_float32(rank, with_entropy):
    from megarl.engine import logprob

    logits_TV = torch.randn(3000, 256, dtype=torch.bfloat16, requires_grad=True)
    with LargestFloat32() as recorded:
        logprobs_T, entropy_T = logprob.logprobs_and_entropy(
            logits_TV * 1.0, torch.zeros(3000, dtype=torch.long), 250, 0.7, with_entropy, with_entropy
        )
        (logprobs_T.sum() + (entropy_T.sum() if with_entropy else 0.0)).backward()
    return recorded.largest, logprob.CHUNK_TOKENS * 256


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_float32_tensor_is_larger_than_a_chunk_of_the_logits(with_entropy):
    ((largest, chunk),) = ranks.run_ranks(largest_float32, 1, with_entropy)
    assert 0 < largest <= chunk
