"""Losses on pairs: by hand, against loops in float64 written from the papers, and however the pairs are laid out."""

import math
from functools import partial

import pytest
import torch
from batches import make_batch

from megarl.algorithms.preference_losses import PREFERENCE_LOSSES, bradley_terry_loss, dpo_loss, ipo_loss
from megarl.data.packing import count_denominators, pack
from megarl.sample import Prompt, Sample

NAN = float("nan")
LOSSES = {
    "dpo": partial(dpo_loss, beta=0.3),
    "smoothed dpo": partial(dpo_loss, beta=0.3, label_smoothing=0.2),
    "ipo": partial(ipo_loss, beta=0.3),
    "reward_model": bradley_terry_loss,
    "centered reward_model": partial(bradley_terry_loss, center=0.1),
}
METRICS = {"chosen_reward", "rejected_reward", "margin", "accuracy"}


def one_pair(loss_of, chosen, rejected):
    """(loss, gradients, metrics) of a pair of single tokens whose reference log-probs are 0."""
    given = torch.tensor([chosen, rejected], requires_grad=True)
    loss, metrics = loss_of(given, make_batch([1, 1], 2, 2, ref_logprobs=torch.zeros(2)))
    loss.backward()
    return loss.item(), given.grad.tolist(), {name: value.item() for name, value in metrics.items()}


def test_every_loss_of_the_table_is_tested_here():
    assert {getattr(loss, "func", loss) for loss in LOSSES.values()} == set(PREFERENCE_LOSSES.values())


def test_dpo_worked_by_hand():
    reward = math.log(3) / 2  # margin ln 3: sigmoid 3/4
    loss, gradients, metrics = one_pair(partial(dpo_loss, beta=0.5), math.log(3), -math.log(3))
    assert loss == pytest.approx(math.log(4 / 3))
    assert gradients == pytest.approx([-0.5 / 4, 0.5 / 4])
    rewards = {"chosen_reward": reward, "rejected_reward": -reward, "margin": 2 * reward}
    assert metrics == pytest.approx(rewards | {"accuracy": 1})


def test_conservative_dpo_worked_by_hand():
    loss, gradients, _ = one_pair(partial(dpo_loss, beta=1.0, label_smoothing=0.25), math.log(3), 0.0)
    assert loss == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))  # at its minimum, sigmoid = 1 - e
    assert gradients == pytest.approx([0, 0], abs=1e-7)


def test_ipo_worked_by_hand():
    loss, gradients, metrics = one_pair(partial(ipo_loss, beta=0.25), 1.0, -2.0)  # h = 3, target 2
    assert loss == pytest.approx(1.0) and gradients == pytest.approx([2, -2])
    assert metrics == {"chosen_reward": 0.25, "rejected_reward": -0.5, "margin": 0.75, "accuracy": 1}


def test_bradley_terry_worked_by_hand():
    loss, gradients, metrics = one_pair(bradley_terry_loss, 0.0, math.log(3))  # sigmoid(-ln 3) = 1/4
    assert loss == pytest.approx(math.log(4)) and gradients == pytest.approx([-0.75, 0.75])
    assert metrics["margin"] == pytest.approx(-math.log(3)) and metrics["accuracy"] == 0
    centered, gradients, _ = one_pair(partial(bradley_terry_loss, center=0.5), 1.0, 1.0)
    assert centered == pytest.approx(math.log(2) + 0.5 * 4) and gradients == pytest.approx([-0.5 + 2, 0.5 + 2])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chosen, accuracy", [(1.0, 1), (-1.0, 0.5), (-3.0, 0)])
def test_a_tie_counts_half(name, chosen, accuracy):
    assert one_pair(LOSSES[name], chosen, -1.0)[2]["accuracy"] == accuracy


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("margin", [1e4, -1e4])
def test_extreme_margins_give_finite_losses_and_gradients(name, margin):
    loss, gradients, metrics = one_pair(LOSSES[name], margin / 2, -margin / 2)
    assert math.isfinite(loss) and all(map(math.isfinite, gradients)) and all(map(math.isfinite, metrics.values()))
    if margin < 0:
        assert gradients[0] < -0.01 and gradients[1] > 0.01  # wrong by far: the full push


def pairs_of(name, count, seed=0):
    """Chosen, rejected, chosen, ... of unequal lengths; a reward model's are scored by one token, others have gaps in
    their masks as a tool's output leaves one."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(2 * count):
        prompt, response = 1 + index % 3, [5, 2, 9, 1, 4, 7][index % 6]
        sample = Sample.from_response(Prompt([], [1] * prompt), [2] * response, group_id=index // 2, index=index)
        if "reward_model" in name:
            sample.loss_mask[:-1] = False
        elif response > 4:
            sample.loss_mask[prompt + 1 : prompt + 3] = False
        sample.ref_logprobs = torch.randn(len(sample.token_ids), generator=generator) - 1
        samples.append(sample)
    return samples


def predictions_of(samples):
    """Log-probs or values [L] of each sample, to be differentiated."""
    return [(torch.linspace(-2, 1, len(s.token_ids)) * math.cos(s.index)).requires_grad_() for s in samples]


def run(name, samples, micro_batches, at_filler=0.0, **padding):
    """(loss, gradients of all predictions, metric sums) over these micro-batches of indices."""
    predictions = predictions_of(samples)
    total, sums = 0.0, dict.fromkeys(METRICS, 0.0)
    for indices in micro_batches:
        chosen = [samples[i] for i in indices]
        batch = pack(chosen, *count_denominators(samples), torch.device("cpu"), **padding, like=samples)
        flat = torch.full(batch.token_ids.shape, at_filler, requires_grad=True)
        parts = list(flat.split(batch.cu_seqlens.diff().tolist()))
        for place, i in enumerate(indices):
            parts[place] = torch.cat([predictions[i], parts[place][len(predictions[i]) :]])
        if batch.ref_logprobs is not None:
            batch.ref_logprobs = torch.where(batch.loss_mask, batch.ref_logprobs, at_filler)
        loss, metrics = LOSSES[name](torch.cat(parts), batch)
        loss.backward()
        assert not flat.grad.any() and metrics.keys() == METRICS
        total += loss.item()
        sums = {key: sums[key] + metrics[key].item() for key in METRICS}
    return total, [torch.zeros(len(p)) if p.grad is None else p.grad for p in predictions], sums


def from_the_paper(name, samples, predictions):
    """Loss and metric sums in plain floats."""
    scores = []
    for sample, values in zip(samples, predictions):
        trained = [t for t, is_trained in enumerate(sample.loss_mask.tolist()) if is_trained]
        offsets = [0.0] * len(values) if "reward_model" in name else sample.ref_logprobs.tolist()
        scores.append(sum(values[t] - offsets[t] for t in trained))
    total, sums = 0.0, dict.fromkeys(METRICS, 0.0)
    for w, l in zip(scores[::2], scores[1::2]):
        scale = 1.0 if "reward_model" in name else 0.3
        if name == "ipo":
            loss = (w - l - 1 / 0.3 / 2) ** 2
        elif name == "smoothed dpo":
            p = 1 / (1 + math.exp(-0.3 * (w - l)))
            loss = -0.8 * math.log(p) - 0.2 * math.log(1 - p)
        else:
            loss = -math.log(1 / (1 + math.exp(-scale * (w - l))))
        if name == "centered reward_model":
            loss += 0.1 * (w + l) ** 2
        total += loss / (len(scores) // 2)
        pair = {"chosen_reward": scale * w, "rejected_reward": scale * l, "margin": scale * (w - l), "accuracy": w > l}
        sums = {key: sums[key] + pair[key] for key in METRICS}
    return total, sums


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_random_inputs_agree_with_a_loop_from_the_papers(name, seed):
    samples = pairs_of(name, 5, seed)
    loss, gradients, sums = run(name, samples, [range(10)])
    predictions = [values.tolist() for values in predictions_of(samples)]
    expected_loss, expected_sums = from_the_paper(name, samples, predictions)
    assert loss == pytest.approx(expected_loss, rel=1e-5) and sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-5)
    for values, gradient in zip(predictions, gradients):
        for t in range(len(values)):
            values[t] += 1e-5
            above = from_the_paper(name, samples, predictions)[0]
            values[t] -= 2e-5
            below = from_the_paper(name, samples, predictions)[0]
            values[t] += 1e-5
            assert gradient[t].item() == pytest.approx((above - below) / 2e-5, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_packed_padded_and_split_with_an_empty_micro_batch_between_are_the_same(name):
    samples = pairs_of(name, 3)
    loss, gradients, sums = run(name, samples, [range(6)])
    assert torch.cat(gradients).norm() > 1e-3
    for micro_batches, padding in (
        ([[0, 1], [], [2, 3, 4, 5]], {}),
        ([[4, 5], [2, 3], [], [0, 1]], {"multiple_of": 8}),
        ([range(6)], {"sequence_multiple": 16}),
        ([range(6), []], {"sequence_multiple": 4, "multiple_of": 72}),
    ):
        other_loss, other_gradients, other_sums = run(name, samples, micro_batches, **padding)
        assert other_loss == pytest.approx(loss, abs=1e-6) and other_sums == pytest.approx(sums, abs=1e-5)
        torch.testing.assert_close(torch.cat(other_gradients), torch.cat(gradients), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_masked_positions_and_fillers_reach_neither_loss_nor_gradient_nor_metrics(name):
    samples = pairs_of(name, 2)
    loss, gradients, sums = run(name, samples, [range(4)])
    for rubbish in (NAN, float("inf"), 1e30):
        other = run(name, samples, [range(4)], at_filler=rubbish, sequence_multiple=8, multiple_of=64)
        assert other[0] == pytest.approx(loss) and other[2] == pytest.approx(sums)
        torch.testing.assert_close(torch.cat(other[1]), torch.cat(gradients))
        predictions = torch.tensor([rubbish, -1.0, rubbish, -2.0, rubbish], requires_grad=True)
        mask = [False, True, False, True, False]
        batch = make_batch([2, 3], 2, 2, loss_mask=mask, ref_logprobs=torch.tensor([rubbish, -1, rubbish, -1, rubbish]))
        loss_of_two, _ = LOSSES[name](predictions, batch)
        loss_of_two.backward()
        assert math.isfinite(loss_of_two.item())
        assert [gradient != 0 for gradient in predictions.grad.tolist()] == mask


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("num_sequences", [4, 0])
def test_an_empty_micro_batch_and_an_empty_step_give_0_and_a_gradient_of_0(name, num_sequences):
    """O11."""
    predictions = torch.full((3,), NAN, requires_grad=True)
    batch = make_batch([3], num_sequences, num_sequences, loss_mask=[False] * 3, ref_logprobs=torch.zeros(3))
    loss, metrics = LOSSES[name](predictions, batch)
    loss.backward()
    assert loss.item() == 0 and predictions.grad.tolist() == [0, 0, 0]
    assert {key: value.item() for key, value in metrics.items()} == dict.fromkeys(METRICS, 0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_no_pair_is_our_mistake(name):
    with pytest.raises(AssertionError, match=r"sequences of \[1, 1, 1\] trained tokens are no pairs"):
        LOSSES[name](torch.zeros(3), make_batch([1, 1, 1], 3, 3, ref_logprobs=torch.zeros(3)))
    with pytest.raises(AssertionError, match=r"sequences of \[1, 0\] trained tokens are no pairs"):
        LOSSES[name](torch.zeros(2), make_batch([1, 1], 1, 1, loss_mask=[True, False], ref_logprobs=torch.zeros(2)))


def test_a_missing_reference_and_two_scores_of_a_sequence_are_our_mistake():
    for loss_of in (partial(dpo_loss, beta=0.1), partial(ipo_loss, beta=0.1)):
        with pytest.raises(AssertionError, match="ref_logprobs"):
            loss_of(torch.zeros(2), make_batch([1, 1], 2, 2))
    with pytest.raises(AssertionError, match="more than one token"):
        bradley_terry_loss(torch.zeros(3), make_batch([1, 2], 3, 2))
