"""Models against each other: counts by hand, p values against all sign patterns and other tests."""

import itertools

import numpy as np
import pytest
import scipy.stats
from evaluated import result
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ConfigError, RunError
from megarl.evaluation.comparison import compare, differences_of, holm, sign_flip_p_value

rewards = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=2, max_size=2), min_size=1, max_size=40)


def test_wins_ties_losses_and_the_difference_by_hand():
    sft = result([[0.0, 1.0], [0.1, 0.2], [1.0, 1.0], [0.0, 0.0]], "sft")
    rl = result([[1.0, 1.0], [0.3, 0.0], [0.0, 1.0], [0.0, 1.0]], "rl")
    (comparison,) = compare([sft, rl])
    assert (comparison.baseline, comparison.model) == ("sft", "rl")
    assert (comparison.wins, comparison.ties, comparison.losses) == (2, 1, 1)  # 0.1 + 0.2 and 0.3 are a tie
    assert comparison.win_rate == 0.625 and comparison.num_left_out == 0
    assert comparison.difference.value == pytest.approx(0.125) and comparison.difference.n == 4
    assert comparison.difference.low < 0.125 < comparison.difference.high
    assert comparison.p_value == comparison.holm_p_value == 1.0  # any three signs of 0.5 give 0.5 or more


@settings(max_examples=40, deadline=None)
@given(rewards)
def test_a_model_compared_with_itself_is_as_good(rewards_PG):
    (comparison,) = compare([result(rewards_PG, "a"), result(rewards_PG, "b")], num_resamples=200)
    assert comparison.win_rate == 0.5 and comparison.p_value == 1.0 and comparison.ties == len(rewards_PG)
    assert comparison.difference.value == 0.0 and comparison.difference.low in (0.0, None)


@settings(max_examples=40, deadline=None)
@given(rewards, st.randoms(use_true_random=False))
def test_changing_sides_changes_signs_only(rewards_PG, random):
    shuffled = random.sample(rewards_PG, len(rewards_PG))
    a, b = result(rewards_PG, "a"), result(shuffled, "b")
    (there,), (back,) = compare([a, b], num_resamples=200), compare([b, a], num_resamples=200)
    assert there.win_rate == pytest.approx(1 - back.win_rate) and there.p_value == back.p_value
    assert there.difference.value == pytest.approx(-back.difference.value)


def test_the_interval_is_of_paired_prompts():
    """Each prompt a little better: prompts differ far more than models do, and that is no part of the interval."""
    base = np.random.default_rng(0).random((50, 1))
    (comparison,) = compare([result(base.tolist(), "a"), result((base + 0.1).tolist(), "b")])
    assert comparison.difference.low == pytest.approx(0.1) == comparison.difference.high


def test_p_values_are_exact_over_all_signs():
    draw = np.random.default_rng(0)
    for n in range(1, 11):
        differences = draw.normal(0.3, 1.0, size=n)
        far = [abs(np.dot(signs, differences)) for signs in itertools.product([1, -1], repeat=n)]
        share = np.mean([value >= abs(differences.sum()) - 1e-9 for value in far])
        assert sign_flip_p_value(differences) == pytest.approx(share, abs=1e-12)


def test_p_values_are_those_of_another_implementation():
    ours, theirs = np.random.default_rng(0).random((2, 12))

    def statistic(x, y, axis):
        return (x - y).sum(axis=axis)

    other = scipy.stats.permutation_test((ours, theirs), statistic, permutation_type="samples", n_resamples=2**12)
    assert sign_flip_p_value(ours - theirs) == pytest.approx(other.pvalue)


@pytest.mark.parametrize("wins, losses", [(0, 0), (1, 0), (5, 5), (9, 2), (20, 0), (3, 14)])
def test_p_values_of_right_and_wrong_are_those_of_the_exact_mcnemar_test(wins, losses):
    differences = np.array([1.0] * wins + [-1.0] * losses + [0.0] * 30)
    expected = scipy.stats.binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_flip_p_value(differences) == pytest.approx(expected)


def test_drawn_p_values_are_near_the_exact_ones(monkeypatch):
    draw = np.random.default_rng(0)
    tested = [draw.normal(mean, 1.0, size=14) for mean in (-0.6, 0.0, 0.3, 0.6)]
    exact = [sign_flip_p_value(differences) for differences in tested]
    monkeypatch.setattr("megarl.evaluation.comparison.MAX_EXACT", 13)
    monkeypatch.setattr("megarl.evaluation.comparison.MAX_DRAWN", 100_000)  # so that there are several rounds
    for differences, p_value in zip(tested, exact):
        error = (p_value * (1 - p_value) / 40_000) ** 0.5
        assert sign_flip_p_value(differences, num_resamples=40_000) == pytest.approx(p_value, abs=4 * error)


def test_drawn_p_values_repeat_with_their_seed_and_are_never_0():
    differences = np.array([1.0] * 40 + [-1.0] * 24)
    assert sign_flip_p_value(differences, 5000, 1) == sign_flip_p_value(differences, 5000, 1)
    assert len({sign_flip_p_value(differences, 5000, seed) for seed in range(6)}) > 1
    assert sign_flip_p_value(np.ones(64), num_resamples=999) == 1 / 1000


def test_equally_good_models_are_found_different_as_often_as_the_level_says():
    draw = np.random.default_rng(0)
    p_values = [sign_flip_p_value(draw.normal(size=30), 199, seed) for seed in range(600)]
    assert 0.03 < np.mean(np.array(p_values) <= 0.05) < 0.07


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.4, 0.001]) == pytest.approx([0.8, 0.8, 0.003])
    assert holm([0.02]) == [0.02] and holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_further_models_are_compared_with_the_first_and_corrected():
    better = [[1.0]] * 12
    comparisons = compare([result([[0.0]] * 12, "a"), result(better, "b"), result([[0.0]] * 11 + [[1.0]], "c")])
    assert [(c.baseline, c.model, c.num_comparisons) for c in comparisons] == [("a", "b", 2), ("a", "c", 2)]
    assert [c.p_value for c in comparisons] == [2 / 2**12, 1.0]
    assert [c.holm_p_value for c in comparisons] == [4 / 2**12, 1.0]
    assert compare([result(better)]) == []


def test_prompts_are_matched_by_their_source_and_left_out_without_a_reward():
    a = result([[0.0], [0.25], [1.0, None], [None, None]], "a")
    b = result([[1.0], [0.75], [None, None], [1.0, 1.0]], "b")
    b.prompts.reverse()
    assert differences_of(a, b).tolist() == [1.0, 0.5]
    (comparison,) = compare([a, b])
    assert comparison.num_left_out == 2 and comparison.wins == 2
    with pytest.raises(RunError, match="b against a: no prompt has a reward of both"):
        compare([result([[1.0]], "a"), result([[None]], "b")])


def test_other_prompts_are_refused_all_at_once():
    a, b, c = (result([[1.0]] * 9, name) for name in ("a", "b", "b"))
    del b.prompts[:7]
    a.prompts.pop()
    c.prompts[0].source = c.prompts[1].source
    c.prompts[2].messages = [{"role": "user", "content": "another question"}]
    with pytest.raises(ConfigError) as error:
        compare([a, b, c])
    lines = str(error.value).splitlines()
    names = ", ".join(f"test.jsonl:{line}" for line in range(1, 6))
    assert lines == [
        "b: 2 models have this name",
        "prompts that b has more than once: test.jsonl:2",
        f"prompts that a has and b lacks: {names} and 2 more",
        "prompts that b has and a lacks: test.jsonl:9",
        "prompts that a has and b lacks: test.jsonl:1",
        "prompts that b has and a lacks: test.jsonl:9",
        "prompts that a and b have in other words, or with another answer: test.jsonl:3",
    ]
