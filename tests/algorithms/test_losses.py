"""Losses against numbers worked by hand, and the property that no split of the batch changes them."""

import math
from functools import partial

import pytest
import torch
from batches import make_batch

from megarl.algorithms.losses import aggregate, policy_loss, sft_loss
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.value_loss import value_loss
from megarl.data.packing import count_denominators, pack
from megarl.sample import Prompt, Sample

NAN = float("nan")
FIELDS = ("old_logprobs", "ref_logprobs", "advantages", "values", "returns", "weights")


def single_token_loss(ratio, advantage, clip_low=0.2, clip_high=0.2, aggregation="token_mean"):
    """(loss, d loss / d logprob, clipped count) of one token."""
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    batch = make_batch([1], 1, 1, old_logprobs=torch.tensor([-1.0]), advantages=torch.tensor([advantage]))
    loss, metrics = policy_loss(logprobs, batch, clip_low, clip_high, aggregation)
    loss.backward()
    return loss.item(), logprobs.grad.item(), metrics["clipped"].item()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, clipped",
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # good and already likelier by more than clip_high: no further push
        (0.5, 2.0, -1.0, -1.0, 0),  # good but less likely: the full push
        (1.5, -2.0, 3.0, 3.0, 0),  # bad and likelier: the full push
        (0.5, -2.0, 1.6, 0.0, 1),  # bad and already less likely by more than clip_low
        (0.9, -2.0, 1.8, 1.8, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipped_objective_worked_by_hand(ratio, advantage, loss, gradient, clipped, aggregation):
    given = single_token_loss(ratio, advantage, aggregation=aggregation)
    assert given == pytest.approx((loss, gradient, clipped), abs=1e-5)


def test_clip_low_and_clip_high_are_separate():
    assert single_token_loss(1.25, 1.0, clip_low=0.2, clip_high=0.28) == pytest.approx((-1.25, -1.25, 0), abs=1e-6)
    assert single_token_loss(1.5, 1.0, clip_low=0.2, clip_high=0.28) == pytest.approx((-1.28, 0, 1), abs=1e-6)
    assert single_token_loss(0.7, -1.0, clip_low=0.4, clip_high=0.28) == pytest.approx((0.7, 0.7, 0), abs=1e-6)


@pytest.mark.parametrize("advantage, gradient", [(1.0, 0.0), (-1.0, 0.0)])
def test_an_extreme_ratio_gives_finite_loss_and_gradient(advantage, gradient):
    logprobs = torch.tensor([200.0], requires_grad=True)
    batch = make_batch([1], 1, 1, old_logprobs=torch.tensor([-1.0]), advantages=torch.tensor([advantage]))
    loss, metrics = policy_loss(logprobs, batch, 0.2, 0.2, "token_mean")
    loss.backward()
    assert math.isfinite(loss.item()) and logprobs.grad.item() == gradient
    assert all(math.isfinite(value.item()) for value in metrics.values())


def test_token_mean_of_unequal_micro_batches_is_1_8():
    """O10."""
    parts = [([1.0, 1, 1, 1], [4]), ([5.0], [1])]
    sums = [aggregate(torch.tensor(losses), make_batch(lengths, 5, 2), "token_mean") for losses, lengths in parts]
    assert sum(sums).item() == pytest.approx(1.8)


def test_token_mean_of_unequal_ranks_is_1_75():
    """O10."""
    parts = [([1.0, 1, 1], [3]), ([4.0], [1])]
    sums = [aggregate(torch.tensor(losses), make_batch(lengths, 4, 2), "token_mean") for losses, lengths in parts]
    assert sum(sums).item() == pytest.approx(1.75)


def test_sequence_mean_weighs_sequences_equally_and_counts_their_trained_tokens_only():
    mask = [False, True, True, True, True, False, True]
    losses = torch.tensor([0.0, 1, 1, 1, 1, 0, 5])
    whole = aggregate(losses, make_batch([5, 2], 5, 2, loss_mask=mask), "sequence_mean")
    first = aggregate(losses[:5], make_batch([5], 5, 2, loss_mask=mask[:5]), "sequence_mean")
    second = aggregate(losses[5:], make_batch([2], 5, 2, loss_mask=mask[5:]), "sequence_mean")
    assert whole.item() == (first + second).item() == pytest.approx(3.0)


@pytest.mark.parametrize("name, length, expected", [("sequence_mean_token_sum", None, 4.5), ("constant", 10, 0.45)])
def test_sums_of_sequences_are_divided_by_their_number_and_by_a_constant_length(name, length, expected):
    parts = [([1.0, 1, 1, 1], [4]), ([5.0], [1])]
    sums = [aggregate(torch.tensor(losses), make_batch(lengths, 5, 2), name, length) for losses, lengths in parts]
    assert sum(sums).item() == pytest.approx(expected)


@pytest.mark.parametrize("length", [None, 0, -3])
def test_the_constant_aggregation_needs_a_length(length):
    with pytest.raises(ValueError, match=f"aggregation_length {length}: .*constant needs one above 0"):
        aggregate(torch.zeros(1), make_batch([1], 1, 1), "constant", length)


def test_an_unknown_aggregation_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'mean': token_mean, sequence_mean, sequence_mean_token_sum or constant"):
        aggregate(torch.zeros(1), make_batch([1], 1, 1), "mean")


def step_of(lengths):
    """Random inputs of one optimizer step: sequences with a prompt of one token, and a linear map as the model."""
    generator = torch.Generator().manual_seed(0)
    T = sum(lengths)

    def rand(*shape):
        return torch.randn(*shape, generator=generator)

    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    mask = torch.ones(T, dtype=torch.bool)
    mask[starts] = False
    fields = {"old_logprobs": -1 + 0.3 * rand(T), "ref_logprobs": -1 + 0.3 * rand(T), "advantages": rand(T)}
    features_T3 = rand(T, 3)
    fields |= {"values": -1 + 0.3 * rand(T), "returns": rand(T), "weights": rand(T).abs()}
    return features_T3, mask, fields


def gradient_of_split(lengths, split, loss_of, padding=0):
    """Sum over micro-batches of loss and gradient, where `split` lists the sequences of each. Each sequence, and each
    micro-batch, is followed by `padding` untrained tokens, with NaN in every field."""
    features_T3, mask, fields = step_of(lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    weight = torch.tensor([0.2, -0.1, 0.3], requires_grad=True)
    total = 0.0
    for sequences in split:
        filler = torch.full((padding,), -1)
        parts = [part for i in sequences for part in (torch.arange(ends[i] - lengths[i], ends[i]), filler)]
        tokens = torch.cat([*parts, filler])
        batch = make_batch(
            [lengths[i] + padding for i in sequences] + [padding] * (padding > 0),
            num_loss_tokens=int(mask.sum()),
            num_sequences=sum(length > 1 for length in lengths),
            loss_mask=(mask[tokens] & (tokens >= 0)).tolist(),
            **{name: torch.where(tokens >= 0, value[tokens], NAN) for name, value in fields.items()},
        )
        loss, _ = loss_of(torch.where(tokens >= 0, -1 + 0.3 * features_T3[tokens] @ weight, NAN), batch)
        loss.backward()
        total += loss.item()
    return total, weight.grad


LOSSES = {
    "token_mean": lambda logprobs, batch: policy_loss(logprobs, batch, 0.2, 0.2, "token_mean", 0.1),
    "sequence_mean": lambda logprobs, batch: policy_loss(logprobs, batch, 0.2, 0.2, "sequence_mean", 0.1),
    "sequence_mean_token_sum": lambda logprobs, batch: policy_loss(
        logprobs, batch, 0.2, 0.2, "sequence_mean_token_sum", 0.1, kl_importance_weighted=True
    ),
    "constant": lambda logprobs, batch: policy_loss(
        logprobs, batch, 0.2, 0.2, "constant", 0.1, kl_estimator="k2", aggregation_length=3
    ),
    **{
        kind: partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="token_mean", kind=kind)
        for kind in POLICY_LOSSES
    },
    "value": partial(value_loss, clip=0.5),
    "sft": sft_loss,
}  # of log-probs, or of values


@pytest.mark.parametrize("name", LOSSES)
def test_any_split_gives_the_loss_and_gradient_of_one_big_batch(name):
    lengths = [6, 2, 9, 1, 4]  # the sequence of one token has nothing to train
    loss, gradient = gradient_of_split(lengths, [[0, 1, 2, 3, 4]], LOSSES[name])
    assert gradient.norm() > 0.01
    splits = ([[0], [1], [2], [3], [4]], [[2, 0], [4, 3, 1]], [[3], [4, 2, 1, 0]])
    for split, padding in [*((split, 0) for split in splits), (splits[1], 3), ([[0, 1, 2, 3, 4]], 7)]:
        split_loss, split_gradient = gradient_of_split(lengths, split, LOSSES[name], padding)
        assert split_loss == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(split_gradient, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_mean_token_sum", "constant"])
def test_the_whole_loss_equals_a_loop_in_float64_at_random_inputs(aggregation):
    lengths = [6, 2, 9, 1, 4]
    _, mask, fields = step_of(lengths)
    generator = torch.Generator().manual_seed(1)
    mask &= torch.rand(len(mask), generator=generator) < 0.8
    logprobs = -1 + 0.5 * torch.randn(len(mask), generator=generator)
    entropy = torch.rand(len(mask), generator=generator)
    names = ("old_logprobs", "ref_logprobs", "advantages", "weights")
    trained = [[t for t in part if mask[t]] for part in torch.arange(len(mask)).split(lengths)]
    num_tokens, num_sequences = sum(map(len, trained)), sum(map(bool, trained))
    batch = make_batch(lengths, num_tokens, num_sequences, loss_mask=mask.tolist(), **fields)
    settings = dict(kl_coefficient=0.1, kl_importance_weighted=True, entropy_coefficient=0.05, aggregation_length=7)
    loss, metrics = policy_loss(logprobs, batch, 0.2, 0.28, aggregation, entropy=entropy, **settings)
    total, sums = 0.0, {"clipped": 0.0, "kl_old": 0.0}
    for sequence in trained:
        for t in sequence:
            p, old, ref, A, weight = (values[t].item() for values in (logprobs, *(fields[name] for name in names)))
            r, clipped = math.exp(p - old), min(max(math.exp(p - old), 0.8), 1.28)
            kl = math.exp(ref - p) - (ref - p) - 1
            term = -weight * min(r * A, clipped * A) + 0.1 * r * kl - 0.05 * entropy[t].item()
            total += (
                term
                / {
                    "token_mean": num_tokens,
                    "sequence_mean": num_sequences * len(sequence),
                    "sequence_mean_token_sum": num_sequences,
                    "constant": num_sequences * 7,
                }[aggregation]
            )
            own = {"clipped": clipped * A < r * A, "kl_old": r - (p - old) - 1}
            sums = {key: sums[key] + own[key] for key in sums}
    assert loss.item() == pytest.approx(total, rel=1e-5) and sums["clipped"] > 0
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(sums, rel=1e-4)


def test_an_end_of_turn_is_trained_and_its_id_may_be_the_paddings_too():
    """O09: 2 ends a turn, stands in the prompt, and fills up."""
    sample = Sample.from_response(Prompt([], [1, 2, 4]), [5, 2], group_id=0, index=0)
    sample.old_logprobs = torch.tensor([0, 0, 0, -1.0, -2.0])
    sample.advantages = sample.loss_mask.float()
    results = []
    for padding, pad_id in (({}, 2), ({"sequence_multiple": 8}, 2), ({"multiple_of": 8}, 2), ({"multiple_of": 8}, 9)):
        batch = pack([sample], *count_denominators([sample]), torch.device("cpu"), **padding)
        batch.token_ids[5:] = pad_id
        assert batch.loss_mask.nonzero().flatten().tolist() == [3, 4] and batch.cu_seqlens[1] in (5, 8)
        logprobs = torch.linspace(-3, -1, len(batch.token_ids))
        logprobs[:5] = torch.tensor([0, 0, 0, -1.1, -1.9])
        logprobs.requires_grad_()
        loss, _ = policy_loss(logprobs, batch, 0.2, 0.2, "token_mean")
        loss.backward()
        assert logprobs.grad.nonzero().flatten().tolist() == [3, 4]
        results.append((loss.item(), logprobs.grad[:5].tolist()))
    assert results == [results[0]] * 4


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rubbish", [NAN, float("inf"), 1e30])
def test_masked_positions_reach_neither_loss_nor_gradient_nor_metrics(name, rubbish):
    mask = [False, True, True, False]

    def run(at_masked):
        logprobs, *others = (
            torch.tensor([at_masked, *trained, at_masked])
            for trained in ((-1.0, -2.0), (-1.1, -1.8), (-1.3, -1.0), (1.0, -1.0), (-1.2, -1.7), (0.5, 1.0), (2.0, 0.5))
        )
        logprobs.requires_grad_()
        fields = dict(zip(FIELDS, others, strict=True))
        loss, metrics = LOSSES[name](logprobs, make_batch([4], 2, 1, loss_mask=mask, **fields))
        loss.backward()
        return loss.item(), logprobs.grad.tolist(), {key: value.item() for key, value in metrics.items()}

    assert run(rubbish) == run(0.0)
    gradient = run(rubbish)[1]
    assert gradient[0] == gradient[3] == 0 and gradient[1] != 0 and gradient[2] != 0


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_train_gives_0_and_a_gradient_of_0(name):
    """O11."""
    for num_loss_tokens, num_sequences in ((7, 2), (0, 0)):  # in this micro-batch; in the whole step
        logprobs = torch.full((3,), NAN, requires_grad=True)
        fields = {key: torch.zeros(3) for key in FIELDS}
        batch = make_batch([3], num_loss_tokens, num_sequences, loss_mask=[False] * 3, **fields)
        loss, _ = LOSSES[name](logprobs, batch)
        loss.backward()
        assert loss.item() == 0 and logprobs.grad.tolist() == [0, 0, 0]


def test_metrics_are_sums_over_trained_tokens():
    old, new = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -1.0])
    batch = make_batch([2], 10, 5, old_logprobs=old, advantages=torch.tensor([1.0, 1.0]))
    _, metrics = policy_loss(new, batch, 0.2, 0.2, "token_mean")
    assert metrics["clipped"].item() == 1
    assert metrics["kl_old"].item() == pytest.approx(math.exp(0.5) - 0.5 - 1, rel=1e-5)  # r = new / old


def test_the_kl_term_is_added_with_its_coefficient_and_the_same_mean():
    logprobs, reference = torch.tensor([-0.5, -1.0, -2.0]), torch.tensor([-1.5, -1.0, -1.0])
    kl = torch.exp(reference - logprobs) - (reference - logprobs) - 1
    batch = make_batch([1, 2], 3, 2, old_logprobs=logprobs, ref_logprobs=reference, advantages=torch.zeros(3))
    token_mean, _ = policy_loss(logprobs, batch, 0.2, 0.2, "token_mean", kl_coefficient=0.5)
    assert token_mean.item() == pytest.approx(0.5 * kl.mean().item(), rel=1e-5)
    sequence_mean, _ = policy_loss(logprobs, batch, 0.2, 0.2, "sequence_mean", kl_coefficient=0.5)
    assert sequence_mean.item() == pytest.approx(0.25 * (kl[0] + kl[1:].mean()).item(), rel=1e-5)


@pytest.mark.parametrize(
    "estimator, weighted, expected, gradient",
    [
        ("k1", False, 1.0, 1.0),
        ("k2", False, 0.5, 1.0),
        ("k3", False, math.exp(-1), 1 - math.exp(-1)),
        ("absolute", False, 1.0, 1.0),
        ("k1", True, 2.0, 4.0),  # the ratio is 2, and its own gradient 2
        ("k3", True, 2 * math.exp(-1), 2.0),
    ],
)
def test_the_kl_term_takes_its_estimator_and_the_ratio_to_the_old_policy(estimator, weighted, expected, gradient):
    policy = torch.tensor([-0.5], requires_grad=True)
    old, reference = torch.tensor([-0.5 - math.log(2)]), torch.tensor([-1.5])
    batch = make_batch([1], 1, 1, old_logprobs=old, ref_logprobs=reference, advantages=torch.zeros(1))
    settings = dict(kl_coefficient=0.1, kl_estimator=estimator, kl_importance_weighted=weighted)
    loss, _ = policy_loss(policy, batch, 0.2, 0.2, "token_mean", **settings)
    loss.backward()
    assert (loss.item(), policy.grad.item()) == pytest.approx((0.1 * expected, 0.1 * gradient), rel=1e-5)


def test_weights_multiply_the_policy_term_and_neither_kl_nor_entropy_nor_denominators():
    logprobs, zeros = torch.full((3,), -1.0, requires_grad=True), torch.zeros(3)
    fields = dict(old_logprobs=torch.full((3,), -1.0), advantages=torch.ones(3), ref_logprobs=torch.full((3,), -1.0))
    batch = make_batch([3], 3, 1, weights=torch.tensor([0.0, 0.5, 2.0]), **fields)
    loss, _ = policy_loss(logprobs, batch, 0.2, 0.2, "token_mean")
    loss.backward()
    assert loss.item() == pytest.approx(-2.5 / 3)
    assert logprobs.grad.tolist() == pytest.approx([0, -0.5 / 3, -2 / 3])
    batch = make_batch([3], 3, 1, weights=zeros, **fields | {"ref_logprobs": torch.full((3,), -2.0)})
    loss, _ = policy_loss(logprobs, batch, 0.2, 0.2, "token_mean", 0.1, 0.01, entropy=torch.full((3,), 2.0))
    assert loss.item() == pytest.approx(0.1 * math.exp(-1) - 0.02, rel=1e-5)


def test_a_kl_term_without_reference_is_our_mistake():
    batch = make_batch([1], 1, 1, old_logprobs=torch.zeros(1), advantages=torch.zeros(1))
    with pytest.raises(AssertionError, match="ref_logprobs"):
        policy_loss(torch.zeros(1), batch, 0.2, 0.2, "token_mean", kl_coefficient=0.1)


def test_sft_loss_equals_a_loop_at_random_inputs():
    lengths = [6, 2, 9, 1, 4]
    _, mask, fields = step_of(lengths)
    loss, metrics = sft_loss(fields["old_logprobs"], make_batch(lengths, int(mask.sum()), 4, loss_mask=mask.tolist()))
    nll = sum(-p for p, is_trained in zip(fields["old_logprobs"].tolist(), mask.tolist()) if is_trained)
    assert loss.item() == pytest.approx(nll / int(mask.sum())) and metrics["nll"].item() == pytest.approx(nll)


def test_sft_loss_is_the_mean_negative_log_likelihood_of_trained_tokens():
    batch = make_batch([3], 2, 1, loss_mask=[False, True, True])
    loss, metrics = sft_loss(torch.tensor([-9.0, -1.0, -3.0]), batch)
    assert loss.item() == 2.0 and metrics["nll"].item() == 4.0
