"""Metrics against numbers worked by hand, all subsets, and known distributions."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
import scipy.stats
from evaluated import response, result

from megarl.errors import ConfigError
from megarl.evaluation.estimators import (
    Estimate,
    bootstrap_means,
    estimates_of,
    majority_at_k,
    mean_of,
    metrics_of,
    pass_at_k,
    validation_metrics,
    votes_of,
)
from megarl.evaluation.results import result_of
from megarl.sample import Prompt, Sample, Status


@pytest.mark.parametrize(
    "n, c, k, expected",
    [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (5, 2, 3, 0.9), (4, 0, 4, 0.0), (4, 2, 3, 1.0), (10_000, 1, 5_000, 0.5)],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response():
    for n in range(1, 9):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    "answers, k, expected",
    [
        ("AAB", 3, 1.0),
        ("ABB", 3, 0.0),
        ("AAB", 2, 2 / 3),  # AA, and AB twice, each half
        ("AB", 2, 0.5),
        ("ABC", 3, 1 / 3),
        ("A---", 4, 1.0),  # who has no answer does not vote
        ("A---", 2, 0.5),
        ("----", 2, 0.0),
        ("AABBC", 5, 0.5),
        ("AAABB", 1, 0.6),
    ],
)
def test_majority_at_k_by_hand(answers, k, expected):
    """A is correct."""
    responses = [response(float(answer == "A"), None if answer == "-" else answer) for answer in answers]
    assert majority_at_k(*votes_of(responses, 1.0), k) == pytest.approx(expected, abs=1e-12)


def majority(responses):
    """Whether the vote is correct: ties are broken, and one of the winner's responses is judged, at random."""
    counts = Counter(response.answer for response in responses if response.answer is not None)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    shares = []
    for winner in winners:
        judged = [response.reward >= 1.0 for response in responses if response.answer == winner]
        shares.append(sum(judged) / len(judged))
    return sum(shares) / len(shares) if shares else 0.0


def test_majority_at_k_is_the_mean_over_all_subsets():
    """One answer may also have several rewards, for its form say."""
    draw = random.Random(0)
    for _ in range(60):
        n = draw.randint(1, 9)
        responses = [response(draw.choice([0.0, 1.0]), draw.choice(["A", "B", "B", "C", "D", None])) for _ in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(responses, k))
            expected = sum(map(majority, subsets)) / len(subsets)
            assert majority_at_k(*votes_of(responses, 1.0), k) == pytest.approx(expected, abs=1e-12)


def test_majority_at_k_of_more_subsets_than_a_float_can_count():
    expected = scipy.stats.hypergeom.sf(150, 2000, 1050, 301)  # of 301 votes at least 151
    assert majority_at_k([(1050, 1.0), (950, 0.0)], 0, 301) == pytest.approx(expected, rel=1e-9)


def test_metrics_by_hand():
    evaluated = result([[1.0, 0.0], [0.5, None], [None, None]], answers_PG=[["18", "19"], ["7", "7"], ["1", "1"]])
    first, second, third = evaluated.prompts
    first.responses[0].num_tokens, second.responses[1].num_tokens = 11, 5
    third.responses[1].truncated = True
    first.responses[0].reward_parts = {"gsm8k": 1.0, "judge/style": 3.0}
    first.responses[1].reward_parts = {"gsm8k": 0.0}
    second.responses[0].reward_parts = {"gsm8k": 0.5}
    metrics = metrics_of(evaluated, ks=(1, 2))
    values = {name: (estimate.value, estimate.n) for name, estimate in metrics.items()}
    assert values == {
        "reward_mean": (0.5, 2),
        "reward/gsm8k": (0.5, 2),
        "reward/judge/style": (3.0, 1),
        "pass@1": (0.25, 2),
        "pass@2": (1.0, 1),  # the second prompt has one reward
        "maj@2": (0.5, 1),
        "length_mean": ((6 + 3 + 1) / 3, 3),  # failed rewards or not
        "truncated_ratio": (pytest.approx(1 / 6), 3),
        "errors": (3.0, 3),
    }
    assert list(metrics) == list(values)
    assert validation_metrics(evaluated, ks=(1, 2)) == {name: value for name, (value, _) in values.items()}
    assert validation_metrics(evaluated, ks=(1,), threshold=0.5)["pass@1"] == 0.75


def test_a_metric_that_no_prompt_has_is_missing():
    assert validation_metrics(result([[None, None]])).keys() == {"length_mean", "truncated_ratio", "errors"}
    assert "maj@2" not in validation_metrics(result([[1.0, 0.0]]), ks=(2,))  # nobody looked for answers
    assert validation_metrics(result([[1.0, 0.0]], answers_PG=[[None, None]]), ks=(2,))["maj@2"] == 0.0


def test_k_beyond_the_responses_is_refused():
    with pytest.raises(ConfigError, match="pass@k with k=3: there are 2 responses to a prompt"):
        metrics_of(result([[1.0, 0.0]]), ks=(1, 3))


def test_metrics_agree_with_an_independent_count():
    draw = random.Random(1)
    answers_PG = [[draw.choice(["18", "18", "20", None]) for _ in range(4)] for _ in range(300)]
    rewards_PG = [[float(answer == "18") for answer in answers] for answers in answers_PG]
    metrics = validation_metrics(result(rewards_PG, answers_PG=answers_PG), ks=(1, 4))
    flat = [answer for answers in answers_PG for answer in answers]
    votes = [(answers.count("18"), answers.count("20")) for answers in answers_PG]
    assert metrics["pass@1"] == metrics["reward_mean"] == pytest.approx(flat.count("18") / 1200)
    assert metrics["pass@4"] == pytest.approx(sum("18" in answers for answers in answers_PG) / 300)
    won, tied = sum(a > b for a, b in votes), sum(a == b > 0 for a, b in votes)
    assert metrics["maj@4"] == pytest.approx((won + tied / 2) / 300)


def test_samples_become_the_responses_to_their_prompts():
    prompts = [Prompt([{"role": "user", "content": "?"}], [1, 2], "18", {"source": f"t.jsonl:{i}"}) for i in (1, 2)]
    texts = ["#### 18", "#### 19", "no", "#### 18"]
    samples = [
        Sample.from_response(prompts[i % 2], [5] * (i + 1), group_id=i % 2, index=i, response_text=text)
        for i, text in enumerate(texts)
    ]
    samples[2].status = Status.TRUNCATED
    for sample, reward in zip(samples, [1.0, None, 0.0, None]):
        sample.reward = reward
    samples[0].reward_parts = {"gsm8k": 1.0}
    failures = {1: "raised ValueError"}
    made = result_of("rl", samples, {"temperature": 1.0}, failures, lambda text: text.partition("#### ")[2] or None)
    assert (made.name, made.settings, made.has_answers) == ("rl", {"temperature": 1.0}, True)
    assert [(prompt.source, prompt.answer) for prompt in made.prompts] == [("t.jsonl:1", "18"), ("t.jsonl:2", "18")]
    first, second = made.prompts
    assert first.responses == [
        response(1.0, "18", "#### 18", 1, parts={"gsm8k": 1.0}),
        response(0.0, None, "no", 3, truncated=True),
    ]
    errors = [(response.reward, response.error) for response in second.responses]
    assert errors == [(None, "raised ValueError"), (None, "its reward was dropped with its group")]
    assert not result_of("rl", samples, {}).has_answers


# Intervals


def test_intervals_cover_the_true_mean_as_often_as_they_say():
    """Responses to one prompt resemble each other: an interval over single responses would be far too narrow."""
    draw, covered, covered_by_responses = np.random.default_rng(0), 0, 0
    for seed in range(400):
        chances_P = draw.beta(0.6, 0.9, size=80)  # of mean 0.4
        rewards_PG = draw.binomial(1, chances_P[:, None], size=(80, 8)).astype(float)
        over_prompts = estimates_of({"x": rewards_PG.mean(axis=1)}, 400, seed)["x"]
        over_responses = estimates_of({"x": rewards_PG.ravel()}, 400, seed)["x"]
        covered += over_prompts.low <= 0.4 <= over_prompts.high
        covered_by_responses += over_responses.low <= 0.4 <= over_responses.high
    assert 0.92 <= covered / 400 <= 0.98
    assert covered_by_responses / 400 < 0.75


def test_intervals_are_those_of_another_implementation():
    values = np.random.default_rng(1).exponential(size=50)
    other = scipy.stats.bootstrap((values,), np.mean, n_resamples=40_000, method="percentile", rng=2)
    ours = estimates_of({"x": values}, 40_000, 3)["x"]
    assert (ours.low, ours.high) == pytest.approx(tuple(other.confidence_interval), abs=0.01)
    assert ours.value == pytest.approx(values.mean()) and ours.n == 50


def test_bootstrap_means_are_of_rows_drawn_with_replacement(monkeypatch):
    """Of 3 rows: all 27 draws occur, about equally often, and in chunks too."""
    monkeypatch.setattr("megarl.evaluation.estimators.MAX_DRAWN", 3000)
    means = bootstrap_means(np.array([[0.0], [1.0], [10.0]]), 27_000, seed=0)[:, 0]
    expected = Counter(round(sum(rows) / 3, 6) for rows in itertools.product([0.0, 1.0, 10.0], repeat=3))
    counts = Counter(np.round(means, 6))
    assert counts.keys() == expected.keys()
    chi = scipy.stats.chisquare([counts[mean] for mean in expected], [1000 * expected[mean] for mean in expected])
    assert chi.pvalue > 0.001


def test_intervals_repeat_with_their_seed():
    values = {"x": np.random.default_rng(0).random(30)}
    assert estimates_of(values, 500, 7) == estimates_of(values, 500, 7) != estimates_of(values, 500, 8)


def test_a_single_prompt_has_no_interval_and_equal_ones_have_one_of_no_width():
    assert metrics_of(result([[1.0, 0.0]]), ks=(1,))["pass@1"] == Estimate(0.5, None, None, 1)
    assert metrics_of(result([[0.1]] * 7), ks=(1,))["reward_mean"] == Estimate(0.1, 0.1, 0.1, 7)


def test_prompts_without_a_number_are_not_part_of_its_mean():
    values = np.array([1.0, math.nan, 4.0, math.nan, 4.0])
    estimate = estimates_of({"x": values, "other": np.arange(5.0)}, 2000, 0)["x"]
    assert (estimate.value, estimate.n) == (mean_of(values), 3) == (3.0, 3)
    assert 1.0 <= estimate.low < 3.0 < estimate.high <= 4.0
