import pytest
import torch

from megarl.data.packing import count_denominators, pack, plan_microbatches
from megarl.sample import Prompt, Sample


def sample(prompt_ids, response_ids):
    return Sample.from_response(Prompt([], prompt_ids), response_ids, group_id=0, index=0)


@pytest.mark.parametrize("lengths", [[10, 20, 30, 5, 5, 5, 40], [100, 3, 2], [7], [], [8] * 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_sample_is_in_one_microbatch_and_ranks_have_equally_many(lengths, num_ranks):
    ranks = plan_microbatches(lengths, max_tokens=40, num_ranks=num_ranks)
    assert len(ranks) == num_ranks and len({len(batches) for batches in ranks}) == 1 and ranks[0]
    assert sorted(i for batches in ranks for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in (batch for batches in ranks for batch in batches):
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= 40


def test_tokens_are_balanced_over_ranks():
    ranks = plan_microbatches([40, 40, 1, 1, 39, 39, 20, 20], max_tokens=40, num_ranks=2)
    loads = [sum([40, 40, 1, 1, 39, 39, 20, 20][i] for batch in batches for i in batch) for batches in ranks]
    assert loads == [100, 100]


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


def test_an_empty_microbatch_has_one_untrained_token():
    batch = pack([], 5, 2, torch.device("cpu"))
    assert batch.token_ids.shape == (1,) and not batch.loss_mask.any() and batch.num_loss_tokens == 5


def test_samples_of_one_microbatch_must_agree_on_their_fields():
    scored, unscored = sample([1], [2]), sample([1], [2])
    scored.old_logprobs = torch.zeros(2)
    with pytest.raises(AssertionError, match="1 of 2 samples of a micro-batch lack old_logprobs"):
        pack([scored, unscored], 2, 2, torch.device("cpu"))
