"""Weights and metrics of off-policy corrections: by hand, and against a loop in float64."""

import math

import pytest
import torch

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.off_policy import CORRECTIONS, correction
from megarl.data.packing import count_denominators, pack
from megarl.sample import Prompt, Sample

NAN = float("nan")


def sample_with(ratios, at_masked=0.0, server=-1.0):
    """A prompt of one token and a response whose tokens have these ratios p_trainer / p_server."""
    made = Sample.from_response(Prompt([], [1]), [2] * len(ratios), group_id=0, index=0)
    made.rollout_logprobs = torch.tensor([at_masked] + [server] * len(ratios))
    made.old_logprobs = torch.tensor([at_masked] + [server + math.log(ratio) for ratio in ratios])
    return made


FIRST, SECOND = [0.25, 1.0, 3.0], [1.5, 1.0]  # products 0.75 and 1.5, geometric means 0.91 and 1.22


@pytest.mark.parametrize(
    "kind, low, high, first, second",
    [
        ("token_tis", 0, 2, [0.25, 1, 2], [1.5, 1]),
        ("token_tis", 0.5, 2, [0.5, 1, 2], [1.5, 1]),
        ("sequence_tis", 0, 1.2, [0.75] * 3, [1.2] * 2),
        ("token_mis", 0, 2, [0.25, 1, 0], [1.5, 1]),
        ("sequence_mis", 0, 1.2, [0.75] * 3, [0, 0]),
        ("sequence_mis", 0.8, 2, [0, 0, 0], [1.5] * 2),
        ("icepop", 0.5, 2, [0, 1, 0], [1.5, 1]),
        ("geometric", 0.9, 1.1, [1, 1, 1], [0, 0]),
        ("geometric", 0.95, 1.3, [0, 0, 0], [1, 1]),
    ],
)
def test_weights_worked_by_hand(kind, low, high, first, second):
    weights, _ = correction([sample_with(FIRST), sample_with(SECOND)], kind, low, high)
    assert [w.dtype for w in weights] == [torch.float32] * 2
    assert weights[0].tolist() == pytest.approx([0, *first], abs=1e-6)
    assert weights[1].tolist() == pytest.approx([0, *second], abs=1e-6)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_catastrophic_token_vetoes_its_sequence_whatever_the_kind(kind):
    samples = [sample_with([1e-5, 1.0, 1e5]), sample_with([1.0, 1.0])]
    weights, metrics = correction(samples, kind, 0.0, 2.0, veto=1e-4)
    assert weights[0].tolist() == [0] * 4 and weights[1].tolist() == [0, 1, 1]
    assert metrics["vetoed"] == 0.5 and metrics["masked"] == pytest.approx(3 / 5) and metrics["clipped"] == 0
    _, metrics = correction(samples, kind, 0.0, 2.0, veto=1e-6)
    assert metrics["vetoed"] == 0


def test_metrics_worked_by_hand():
    samples = [sample_with(FIRST), sample_with(SECOND)]
    _, metrics = correction(samples, "token_tis", 0.0, 2.0)
    logs = [math.log(r) for r in FIRST + SECOND]
    assert metrics == pytest.approx(
        {
            "ess": (0.25 + 1 + 2 + 1.5 + 1) ** 2 / (0.0625 + 1 + 4 + 2.25 + 1) / 5,
            "clipped": 1 / 5,
            "masked": 0.0,
            "vetoed": 0.0,
            "kl_k1": -sum(logs) / 5,
            "kl_k3": (0.25 + 1 + 3 + 1.5 + 1) / 5 - 1 - sum(logs) / 5,
            "perplexity_gap": math.exp(1 - sum(logs) / 5) - math.e,
        },
        abs=1e-6,
    )
    _, metrics = correction(samples, "icepop", 0.5, 2.0)
    assert (metrics["clipped"], metrics["masked"]) == (0, pytest.approx(2 / 5))


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_equal_policies_give_weights_of_1_and_metrics_of_no_mismatch(kind):
    weights, metrics = correction([sample_with([1.0] * 4), sample_with([1.0])], kind, 0.5, 2.0, veto=1e-4)
    assert weights[0].tolist() == [0, 1, 1, 1, 1] and weights[1].tolist() == [0, 1]
    assert metrics["ess"] == 1 and all(value == 0 for name, value in metrics.items() if name != "ess")


def from_the_paper(kind, ratios, low, high, veto):
    product = math.prod(ratios)
    geometric = product ** (1 / len(ratios))
    weights = []
    for r in ratios:
        w = product if kind.startswith("sequence") else r
        if kind == "geometric":
            w = 1.0 if low <= geometric <= high else 0.0
        elif kind.endswith("tis"):
            w = min(max(w, low), high)
        elif not low <= w <= high:
            w = 0.0
        weights.append(0.0 if min(ratios) < veto else w)
    return weights


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_random_inputs_agree_with_a_loop_from_the_papers(kind):
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 2, 3, 5, 20, 60] * 4
    ratios = [torch.exp(0.5 * torch.randn(n, generator=generator)).tolist() for n in lengths]
    weights, metrics = correction([sample_with(r) for r in ratios], kind, 0.7, 1.4, veto=0.3)
    expected = [from_the_paper(kind, r, 0.7, 1.4, 0.3) for r in ratios]
    for given, own in zip(weights, expected):
        assert given[1:].tolist() == pytest.approx(own, rel=1e-4)
    flat = [w for own in expected for w in own]
    assert metrics["ess"] == pytest.approx(sum(flat) ** 2 / sum(w * w for w in flat) / len(flat), rel=1e-4)
    assert 0 < metrics["vetoed"] < 1 and metrics["masked"] == pytest.approx(flat.count(0.0) / len(flat))


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_masked_positions_are_never_looked_at(kind):
    def run(at_masked):
        interrupted = sample_with([0.25, 1.0, 1.0, 3.0], at_masked)
        interrupted.loss_mask[2] = False  # a token put in by a tool, say
        interrupted.old_logprobs[2] = at_masked
        weights, metrics = correction([interrupted], kind, 0.0, 2.0, veto=0.1)
        return weights[0].tolist(), metrics

    weights, metrics = run(0.0)
    assert run(NAN) == run(-50.0) == (weights, metrics)
    whole, expected = correction([sample_with(FIRST)], kind, 0.0, 2.0, veto=0.1)
    assert [weights[i] for i in (0, 1, 3, 4)] == whole[0].tolist() and weights[2] == 0 and metrics == expected


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_trained_logprob_that_is_nan_is_not_hidden(kind):
    broken = sample_with([1.0, 1.0])
    broken.rollout_logprobs[2] = NAN
    weights, _ = correction([broken], kind, 0.0, 2.0, veto=0.1)
    assert math.isnan(weights[0][2])


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_extreme_ratios_give_finite_weights_and_metrics(kind, difference):
    extreme = sample_with([1.0])
    extreme.old_logprobs[1] += difference
    weights, metrics = correction([extreme], kind, 0.0, 2.0)
    assert torch.isfinite(weights[0]).all() and all(math.isfinite(value) for value in metrics.values())


def test_without_trained_tokens_there_are_no_metrics():
    untrained = sample_with([1.0])
    untrained.loss_mask[:] = False
    assert correction([untrained], "geometric", 0.5, 2.0, veto=0.1)[1] == {}
    weights, metrics = correction([untrained, sample_with([3.0])], "sequence_tis", 0.5, 2.0)
    assert weights[0].tolist() == [0, 0] and weights[1].tolist() == [0, 2] and metrics["clipped"] == 1


def test_an_unknown_kind_and_a_band_without_1_are_refused():
    with pytest.raises(AssertionError, match="'tis': token_tis, sequence_tis"):
        correction([], "tis", 0.0, 2.0)
    with pytest.raises(AssertionError, match="low 1.5, high 2.0"):
        correction([], "icepop", 1.5, 2.0)


def test_weights_reach_the_loss_of_a_packed_batch():
    samples = [sample_with(FIRST), sample_with(SECOND)]
    weights, _ = correction(samples, "token_tis", 0.0, 2.0)
    for sample, own in zip(samples, weights):
        sample.weights, sample.advantages = own, sample.loss_mask.float()
    batch = pack(samples, *count_denominators(samples), torch.device("cpu"), sequence_multiple=8)
    loss, _ = policy_loss(batch.old_logprobs, batch, 0.2, 0.2, "token_mean")
    assert loss.item() == pytest.approx(-(0.25 + 1 + 2 + 1.5 + 1) / 5)
