import pytest
import torch
from ranks import run_ranks


def vocab_parallel(rank, logits_TV, targets_T, vocab_size, temperature, chunk):
    from megarl.engine import logprob, parallel

    logprob.CHUNK_TOKENS = chunk
    shard = logits_TV.chunk(parallel.tensor_parallel_size(), dim=1)[rank].clone().requires_grad_()
    logprobs_T, entropy_T = logprob.logprobs_and_entropy(shard, targets_T, vocab_size, temperature, with_entropy=True)
    (logprobs_T * torch.arange(1, len(targets_T) + 1)).sum().backward()
    return logprobs_T.detach().numpy(), entropy_T.numpy(), shard.grad.numpy()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_a_plain_softmax_and_ignores_padded_columns(tensor_parallel, temperature):
    """O18: 101 tokens in 256 columns; the padding holds +100 and would win every softmax. With TP 2 the second rank
    holds padding alone."""
    generator = torch.Generator().manual_seed(3)
    logits_TV = 3 * torch.randn(5, 256, generator=generator)
    logits_TV[:, 101:] = 100.0
    targets_T = torch.tensor([0, 100, 7, 63, 64])

    plain = logits_TV[:, :101].clone().double().requires_grad_()
    expected = (plain / temperature).log_softmax(-1)
    entropy = -(expected.exp() * expected).sum(-1).detach()
    (expected[torch.arange(5), targets_T] * torch.arange(1, 6)).sum().backward()

    results = run_ranks(
        vocab_parallel, tensor_parallel, logits_TV, targets_T, 101, temperature, 2, tensor_parallel=tensor_parallel
    )
    gradient = torch.cat([torch.tensor(result[2]) for result in results], dim=1)
    for logprobs_T, entropy_T, _ in results:
        torch.testing.assert_close(torch.tensor(logprobs_T).double(), expected[torch.arange(5), targets_T].detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(entropy_T).double(), entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient[:, :101].double(), plain.grad, atol=1e-5, rtol=0)
    assert (gradient[:, 101:] == 0).all()
