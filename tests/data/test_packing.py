import random

import pytest
import torch

from megarl.data.packing import count_denominators, pack, padded, plan_microbatches
from megarl.sample import Prompt, Sample


def sample(prompt_ids, response_ids):
    return Sample.from_response(Prompt([], prompt_ids), response_ids, group_id=0, index=0)


def random_lengths(rng, budget):
    """None, a few or many; of one token, within the budget, or oversize."""
    choices = (lambda: 1, lambda: rng.randint(1, budget), lambda: rng.randint(1, 1 + budget // 8), lambda: 2 * budget)
    return [rng.choice(choices)() for _ in range(rng.choice([0, 1, 3, 10, 60]))]


def test_every_sample_is_in_one_microbatch_and_ranks_have_equally_many():
    for seed in range(500):
        rng = random.Random(seed)
        budget, num_ranks, count_multiple = rng.randint(1, 200), rng.randint(1, 8), rng.randint(1, 4)
        lengths = random_lengths(rng, budget)
        costs = rng.choice([None, [length**2 for length in lengths], [0.0] * len(lengths)])
        ranks = plan_microbatches(lengths, budget, num_ranks, costs, count_multiple)
        assert len(ranks) == num_ranks and len({len(batches) for batches in ranks}) == 1, seed
        assert len(ranks[0]) > 0 and len(ranks[0]) % count_multiple == 0, seed
        assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(len(lengths))), seed
        for batch in (batch for batches in ranks for batch in batches):
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget, seed


def test_no_two_microbatches_would_fit_into_one():
    for seed in range(100):
        rng = random.Random(seed)
        lengths = random_lengths(rng, 100)
        totals = sorted(sum(lengths[i] for i in batch) for batch in plan_microbatches(lengths, 100, num_ranks=1)[0])
        assert len(totals) == 1 or totals[0] + totals[1] > 100, seed


def test_samples_are_split_for_the_count_before_microbatches_stay_empty():
    batches = plan_microbatches([8] * 7, max_tokens=100, num_ranks=2, count_multiple=3)
    assert sorted(len(batch) for rank in batches for batch in rank) == [1, 1, 1, 1, 1, 2]
    assert [len(batch) for rank in plan_microbatches([5], 100, 2, count_multiple=2) for batch in rank] == [1, 0, 0, 0]


def test_pairs_stay_side_by_side_and_in_order():
    for seed in range(300):
        rng = random.Random(seed)
        budget, num_ranks, count_multiple = rng.randint(1, 200), rng.randint(1, 8), rng.randint(1, 4)
        lengths = random_lengths(rng, budget) * 2
        rng.shuffle(lengths)
        ranks = plan_microbatches(lengths, budget, num_ranks, None, count_multiple, unit=2)
        batches = [batch for rank in ranks for batch in rank]
        pairs = [tuple(batch[i : i + 2]) for batch in batches for i in range(0, len(batch), 2)]
        assert sorted(pairs) == [(i, i + 1) for i in range(0, len(lengths), 2)], seed
        assert all(len(batch) <= 2 or sum(lengths[i] for i in batch) <= budget for batch in batches), seed
    with pytest.raises(AssertionError, match="3 samples in units of 2"):
        plan_microbatches([1, 1, 1], 10, num_ranks=1, unit=2)


def test_tokens_are_balanced_over_ranks():
    ranks = plan_microbatches([40, 40, 1, 1, 39, 39, 20, 20], max_tokens=40, num_ranks=2)
    loads = [sum([40, 40, 1, 1, 39, 39, 20, 20][i] for batch in batches for i in batch) for batches in ranks]
    assert loads == [100, 100]


def test_costs_balance_the_ranks_where_tokens_do_not():
    """Attention makes a long sample cost more than its tokens: here a token of the longest costs five times one of the
    shortest."""
    rng = random.Random(0)
    lengths = [min(8000, 1 + int(rng.lognormvariate(6.5, 1))) for _ in range(512)]
    costs = [length * (1 + length / 2000) for length in lengths]

    def max_over_mean(plan):
        loads = [sum(costs[i] for batch in batches for i in batch) for batches in plan]
        return max(loads) * len(loads) / sum(loads)

    by_cost = max_over_mean(plan_microbatches(lengths, 8192, num_ranks=8, costs=costs))
    by_tokens = max_over_mean(plan_microbatches(lengths, 8192, num_ranks=8))
    assert by_cost < 1.02 < 1.1 < by_tokens


def test_packed_batch_keeps_positions_boundaries_and_masks():
    """O08: the mask covers the response, with or without an end-of-turn token, and comes from lengths alone."""
    truncated, completed = sample([1, 2], [5, 6, 7]), sample([3], [5, 2])
    assert count_denominators([truncated, completed]) == (5, 2)
    batch = pack([truncated, completed], 5, 2, torch.device("cpu"))
    assert batch.token_ids.tolist() == [1, 2, 5, 6, 7, 3, 5, 2]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 8] and batch.max_seqlen == 5
    assert batch.loss_mask.tolist() == [False, False, True, True, True, False, True, True]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 3


def test_values_at_predicting_positions_move_to_the_predicted_tokens_of_their_own_sequence():
    batch = pack([sample([1, 2], [5]), sample([3], [4])], 2, 2, torch.device("cpu"))
    assert batch.targets[:2].tolist() == [2, 5] and batch.targets[3].item() == 4
    assert batch.align(torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0])).tolist() == [0.0, 10.0, 11.0, 0.0, 13.0]


def test_a_microbatch_is_filled_up_by_an_untrained_sequence():
    batch = pack([sample([1, 2], [5])], 1, 1, torch.device("cpu"), multiple_of=4)
    assert batch.token_ids.tolist() == [1, 2, 5, 0] and batch.loss_mask.tolist() == [False, False, True, False]
    assert batch.cu_seqlens.tolist() == [0, 3, 4] and batch.positions.tolist() == [0, 1, 2, 0]
    assert pack([sample([1, 2], [5])], 1, 1, torch.device("cpu"), multiple_of=3).cu_seqlens.tolist() == [0, 3]


def test_each_sequence_is_padded_at_its_end_with_tokens_that_are_not_trained():
    first, second = sample([1, 2], [5]), sample([3], [4, 6, 7, 8])
    for one in (first, second):
        one.old_logprobs = one.advantages = torch.where(one.loss_mask, -1.5, 0.0)
    batch = pack([first, second], 5, 2, torch.device("cpu"), sequence_multiple=4)
    assert batch.token_ids.tolist() == [1, 2, 5, 0, 3, 4, 6, 7, 8, 0, 0, 0]
    assert batch.loss_mask.nonzero().flatten().tolist() == [2, 5, 6, 7, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.cu_seqlens.tolist() == [0, 4, 12] and batch.max_seqlen == 8
    assert batch.sequence_ids.tolist() == [0] * 4 + [1] * 8
    assert batch.old_logprobs.tolist() == batch.advantages.tolist() == torch.where(batch.loss_mask, -1.5, 0.0).tolist()
    assert batch.ref_logprobs is None


@pytest.mark.parametrize(
    "multiple_of, both, ends", [(2, 4, [0, 4, 8]), (16, 16, [0, 4, 8, 16]), (6, 12, [0, 4, 8, 12])]
)
def test_a_microbatch_is_filled_up_to_both_multiples(multiple_of, both, ends):
    batch = pack([sample([1, 2], [5]), sample([3], [4])], 2, 2, torch.device("cpu"), multiple_of, sequence_multiple=4)
    assert batch.cu_seqlens.tolist() == ends and len(batch.token_ids) == ends[-1]
    empty = pack([], 2, 2, torch.device("cpu"), multiple_of, sequence_multiple=4)
    assert empty.cu_seqlens.tolist() == [0, both] and not empty.loss_mask.any()


def test_padded_is_the_next_multiple():
    assert [padded(length, 4) for length in (1, 3, 4, 5)] == [4, 4, 4, 8] and padded(7, 1) == 7


def test_an_empty_microbatch_has_one_untrained_token():
    batch = pack([], 5, 2, torch.device("cpu"))
    assert batch.token_ids.shape == (1,) and not batch.loss_mask.any() and batch.num_loss_tokens == 5


def test_samples_of_one_microbatch_must_agree_on_their_fields():
    scored, unscored = sample([1], [2]), sample([1], [2])
    scored.old_logprobs = torch.zeros(2)
    with pytest.raises(AssertionError, match="1 of 2 samples of a micro-batch lack old_logprobs"):
        pack([scored, unscored], 2, 2, torch.device("cpu"))
