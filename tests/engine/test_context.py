"""How context parallelism cuts a packed batch; the attention over it needs a GPU (tests/gpu)."""

import torch
from ranks import run_ranks

from megarl.data.packing import pack
from megarl.engine.context import token_order
from megarl.sample import Prompt, Sample


def batch(lengths, sequence_multiple):
    samples = [Sample.from_response(Prompt([], [1]), list(range(2, n + 1)), group_id=0, index=0) for n in lengths]
    return pack(samples, 1, 1, torch.device("cpu"), sequence_multiple=sequence_multiple)


def test_each_rank_has_a_chunk_from_the_front_and_one_from_the_back_of_every_sequence():
    packed = batch([8, 3], sequence_multiple=4)
    order = token_order(packed.cu_seqlens, packed.positions, packed.sequence_ids, size=2)
    assert order.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_three_ranks_share_every_token_once():
    packed = batch([5, 13, 6], sequence_multiple=6)
    order = token_order(packed.cu_seqlens, packed.positions, packed.sequence_ids, size=3)
    assert sorted(order.flatten().tolist()) == list(range(6 + 18 + 6)) and order.shape == (3, 10)


def there_and_back(rank):
    from megarl.engine import context

    packed = batch([7, 2, 11], sequence_multiple=4)
    split = context.split(packed)
    mine = split.mine(packed.token_ids.float() + 0.5).requires_grad_()
    whole = split.whole(mine)
    weights = torch.arange(1.0, len(packed.token_ids) + 1)
    (whole * weights).sum().backward()
    return torch.equal(whole, packed.token_ids + 0.5), torch.equal(mine.grad, split.mine(weights))


def test_results_come_together_on_every_rank_and_each_differentiates_its_own():
    assert run_ranks(there_and_back, 2, context_parallel=2) == [(True, True)] * 2
