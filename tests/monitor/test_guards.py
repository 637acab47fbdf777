"""Guards on made-up metrics: silent, alarm at the expected step, recovery, patience, off, absent, resumed."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.config import Config
from megarl.config_errors import known_keys
from megarl.config_guard_checks import check_guards
from megarl.config_guards import GuardsConfig
from megarl.monitor.guards import GUARDS, Guards

CONSTANT = {"reward/mean": 0.0, "reward/std": 0.0, "group/zero_std_ratio": 1.0}
MIXED = {"reward/mean": 0.5, "reward/std": 0.5, "group/zero_std_ratio": 0.94}


def lines(key, values):
    """A line per step from 1 on; None: a step without the metric."""
    return [{"step": step} | ({} if value is None else {key: value}) for step, value in enumerate(values, start=1)]


def numbered(metrics):
    return [{"step": step} | of_step for step, of_step in enumerate(metrics, start=1)]


def alarms(metrics, **config):
    guards = Guards(GuardsConfig.model_validate(config))
    return [alarm for line in metrics for alarm in guards.check(line)]


def duplicated(ratio, std=0.5):
    return {"response/failed_duplicate_ratio": ratio, "reward/std": std}


KL, LENGTH, CUT = "kl/ref", "response/length_mean", "response/truncated_ratio"
NORM, DIFF = "grad_norm", "rollout/logprob_diff_mean"
NOISE = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 0.7, 1.0, 1.1, 0.9]  # ten steps of median 1
CASES = {  # name -> guard, its keys other than the defaults, metrics, steps of its alarms
    "all groups equal": ("constant_reward", {}, numbered([CONSTANT] * 8), [5]),
    "one group of 16 is not": ("constant_reward", {}, numbered([MIXED] * 20), []),
    "above a lower limit": ("constant_reward", {"limit": 0.9, "patience": 1}, numbered([MIXED]), [1]),
    "one step teaches": ("constant_reward", {}, numbered([CONSTANT] * 4 + [MIXED] + [CONSTANT] * 4), []),
    "groups of one, equal": (
        "constant_reward",
        {"patience": 2},
        numbered([{"reward/mean": 1.0, "reward/std": 0.0}] * 3),
        [2],
    ),
    "groups of one, mixed": ("constant_reward", {"patience": 1}, numbered([{"reward/mean": 1, "reward/std": 0.1}]), []),
    "a teacher and not the reward": (
        "constant_reward",
        {"patience": 1},
        numbered([CONSTANT | {"distillation/reverse_kl": 0.1}] * 9),
        [],
    ),
    "far from the reference": ("kl", {}, lines(KL, [0.0, 0.5] + [1.1] * 9), [7]),
    "at the bound": ("kl", {"patience": 1}, lines(KL, [1.0] * 9), []),
    "single steps of k3's tail": ("kl", {}, lines(KL, [0.1, 7.0, 0.2, 3.0] * 9), []),
    "no lower bound": ("kl", {"patience": 1}, lines(KL, [0.0] * 9), []),
    "below the band": ("kl", {"low": 0.01, "patience": 3}, lines(KL, [0.0, 0.02, 0.0, 0.001, 0.0, 0.0]), [5]),
    "no upper bound": ("kl", {"high": None, "patience": 1}, lines(KL, [99.0] * 9), []),
    "a step without it": ("kl", {"patience": 3}, lines(KL, [2.0, 2.0, None, 2.0]), [4]),
    "entropy falls to a tenth": ("entropy", {}, lines("entropy", NOISE + [0.1] * 30), []),
    "entropy collapses": ("entropy", {}, lines("entropy", NOISE + [0.04] * 9), [15]),
    "low from the start": ("entropy", {}, lines("entropy", [0.01] * 30), []),
    "low from the start, with a bound": ("entropy", {"low": 0.02, "patience": 2}, lines("entropy", [0.01] * 5), [2]),
    "collapse within the first steps": ("entropy", {"patience": 1}, lines("entropy", [1.0] * 6 + [0.01] * 9), [10]),
    "no share": ("entropy", {"share": None, "patience": 1}, lines("entropy", NOISE + [0.0] * 9), []),
    "half as long within 40 steps": ("short_responses", {}, lines(LENGTH, [100 - 1.25 * i for i in range(41)]), []),
    "suddenly short": ("short_responses", {}, lines(LENGTH, [100.0] * 10 + [49.0] * 9), [13]),
    "short once": ("short_responses", {}, lines(LENGTH, ([100.0] * 10 + [5.0] * 2) * 5), []),
    "short before there is a median": ("short_responses", {"patience": 1}, lines(LENGTH, [100.0] * 9 + [9.0]), []),
    "the median is of the last steps": (
        "short_responses",
        {"patience": 1, "window": 10},
        lines(LENGTH, [900.0] * 10 + [100.0] * 10 + [60.0, 40.0]),
        [11, 22],
    ),
    "all truncated": ("truncated", {}, lines(CUT, [0.3] + [0.8] * 9), [6]),
    "many truncated": ("truncated", {}, lines(CUT, [0.79] * 20), []),
    "copies of bad responses": ("duplicates", {}, numbered([duplicated(0.4)] * 9), [5]),
    "a short answer": ("duplicates", {}, numbered([duplicated(0.21)] * 20), []),
    "equal rewards between": (
        "duplicates",
        {"patience": 3},
        numbered([duplicated(0.5)] * 2 + [duplicated(0.0, std=0.0)] * 9 + [duplicated(0.5)]),
        [12],
    ),
    "server and trainer drift": ("mismatch", {}, lines(DIFF, [0.01 * n for n in NOISE] + [0.031] * 9), [15]),
    "twice as far": ("mismatch", {}, lines(DIFF, [0.01 * n for n in NOISE] + [0.029] * 20), []),
    "float32's rounding": ("mismatch", {}, lines(DIFF, [4e-7] * 10 + [9e-6] * 20), []),
    "drift from equality": ("mismatch", {"floor": 0}, lines(DIFF, [0.0] * 10 + [1e-9] * 9), [15]),
    "a spike": ("grad_norm", {}, lines(NORM, NOISE * 3 + [10.1] + NOISE), [31]),
    "not yet a spike": ("grad_norm", {}, lines(NORM, NOISE * 3 + [10.0] + NOISE), []),
    "a spike before there is a median": ("grad_norm", {}, lines(NORM, NOISE[:9] + [99.0]), []),
    "a small one": ("grad_norm", {}, lines(NORM, [0.01] * 20 + [0.9]), []),
    "steps that teach nothing between": ("grad_norm", {}, lines(NORM, [0.0, 0.0, 2.0] * 20), []),
    "a new level": ("grad_norm", {"patience": 5}, lines(NORM, [1.0] * 20 + [30.0] * 30), [25]),
}


@pytest.mark.parametrize("guard, config, metrics, steps", CASES.values(), ids=CASES)
def test_an_alarm_comes_at_the_step_where_patience_ends_and_otherwise_none(guard, config, metrics, steps):
    raised = alarms(metrics, **{guard: config})
    assert [(alarm.guard, alarm.step, alarm.action) for alarm in raised] == [(guard, step, "warn") for step in steps]


def hacking(validations, rewards, every=10):
    """Lines of a run that validates before it and every so many steps; a reward for each of the steps between."""
    metrics = [{"step": 0, "validation/reward_mean": validations[0]}]
    for number, reward in enumerate(rewards):
        steps = range(number * every + 1, number * every + every + 1)
        metrics += [{"step": step, "reward/mean": reward, "reward/std": 0.5} for step in steps]
        metrics.append({"step": steps[-1], "validation/reward_mean": validations[number + 1]})
    return metrics


HACKING = {
    "both rise": ([0.1, 0.5, 0.9, 0.9], [0.3, 0.6, 0.8], {}, []),
    "held out falls, training rises": ([0.3, 0.5, 0.45, 0.35], [0.3, 0.5, 0.8], {}, [30]),
    "it falls from the start": ([0.5, 0.45, 0.3], [0.3, 0.5], {}, [20]),
    "both fall": ([0.3, 0.5, 0.45, 0.2], [0.5, 0.4, 0.3], {}, []),
    "training rises no more": ([0.3, 0.5, 0.3, 0.3], [0.5, 0.5, 0.51], {}, []),
    "only two validations": ([0.9, 0.1], [0.5], {}, []),
    "within the margin": ([0.3, 0.5, 0.41, 0.41], [0.3, 0.5, 0.8], {}, []),
    "a smaller margin": ([0.3, 0.5, 0.41, 0.41], [0.3, 0.5, 0.8], {"margin": 0.05}, [30]),
    "patience counts validations": ([0.3, 0.5, 0.1, 0.1, 0.1], [0.3, 0.5, 0.8, 0.9], {"patience": 2}, [40]),
    "a new best begins anew": ([0.3, 0.5, 0.2, 0.6, 0.6, 0.3], [0.3, 0.5, 0.8, 0.8, 0.8], {}, []),
}


@pytest.mark.parametrize("validations, rewards, config, steps", HACKING.values(), ids=HACKING)
def test_a_rising_reward_beside_a_falling_held_out_mean_is_an_alarm(validations, rewards, config, steps):
    guards, raised = Guards(GuardsConfig.model_validate({"reward_hacking": config})), []
    for line in hacking(validations, rewards):
        found = guards.check(line)
        assert "validation/reward_mean" in line or not found
        raised += [(alarm.guard, alarm.step) for alarm in found]
    assert raised == [("reward_hacking", step) for step in steps]


def test_without_validations_training_rewards_are_not_remembered():
    guards = Guards(GuardsConfig())
    for line in hacking([0.1, 0.1, 0.1], [0.3, 0.8])[1:10]:
        guards.check(line)
    assert "reward_hacking" not in guards.state_dict()


def test_an_alarm_that_lasts_is_repeated_and_one_that_ended_comes_again():
    metrics = lines(CUT, [0.9] * 12 + [0.1] + [0.9] * 3)
    raised = alarms(metrics, repeat_every=4, truncated={"patience": 2})
    assert [alarm.step for alarm in raised] == [2, 6, 10, 15]
    assert "step 10, 10 times in a row:" in raised[2].text and "step 15, 2 times in a row:" in raised[3].text


def test_stop_is_passed_on_and_off_is_silent_without_state():
    metrics = lines(KL, [5.0] * 9)
    assert [alarm.action for alarm in alarms(metrics, kl={"action": "stop"})] == ["stop"]
    guards = Guards(GuardsConfig.model_validate({name: {"action": "off"} for name in GUARDS}))
    everything = {"step": 1, **CONSTANT, KL: 9.0, CUT: 1.0, LENGTH: 1.0, "entropy": 0.0, NORM: 9.0}
    assert all(guards.check(everything | {"step": step}) == [] for step in range(1, 20)) and guards.state_dict() == {}


def test_a_guard_without_its_metrics_is_silent_and_has_no_state():
    guards = Guards(GuardsConfig())
    assert all(guards.check({"step": step, "loss/policy": 1.0}) == [] for step in range(1, 99))
    assert guards.state_dict() == {}


def healthy_run(num_steps=150, seed=0):
    """Lines as the quickstart's: the task is learnt in 50 steps, the policy becomes sure, groups become equal."""
    draw = random.Random(seed)
    metrics = [{"step": 0, "validation/reward_mean": 0.08}]
    for step in range(1, num_steps + 1):
        learnt = 1 - 0.95 ** (step - 1)
        sure = 1 - 0.99 ** (step - 1)
        metrics.append(
            {
                "step": step,
                "reward/mean": 0.35 + 0.58 * learnt + draw.uniform(-0.06, 0.06),
                "reward/std": 0.48 - 0.25 * learnt,
                "group/zero_std_ratio": draw.randint(0, 2) / 16 + 0.75 * sure,
                LENGTH: 6.2 + 2 * learnt + draw.uniform(-0.3, 0.3),
                CUT: draw.randint(0, 3) / 128,
                "response/duplicate_ratio": 0.3 + 0.5 * learnt,
                "response/failed_duplicate_ratio": 0.21 - 0.2 * learnt,
                KL: 0.15 * learnt * draw.choice([1, 1, 1, 0.6, 2, 5]),
                "entropy": 0.39 * (1 - 0.75 * learnt - 0.14 * sure) * draw.uniform(0.8, 1.2),
                NORM: 0.6 * draw.uniform(0.45, 2.1),
                DIFF: 4e-7 * draw.uniform(0.8, 1.2),
            }
        )
        if step % 10 == 0:
            held_out = min(0.08 + 1.2 * learnt, 1.0) + draw.uniform(-0.03, 0.0)
            metrics.append({"step": step, "validation/reward_mean": held_out})
    return metrics


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_raises_no_alarm_at_the_defaults(seed):
    assert alarms(healthy_run(seed=seed)) == []


def broken_run():
    """The same, and from step 60 on everything goes wrong, with a better spell."""
    wrong = {**CONSTANT, KL: 4.0, "entropy": 0.001, LENGTH: 1.0, CUT: 1.0, NORM: 99.0, DIFF: 1e-4}
    metrics = healthy_run()
    for line in metrics:
        if "reward/mean" in line and line["step"] >= 60 and line["step"] not in range(80, 83):
            line |= wrong if line["step"] % 20 < 10 else wrong | {**duplicated(0.7), "reward/mean": 0.99}
        if "validation/reward_mean" in line and line["step"] >= 70:
            line["validation/reward_mean"] = 0.2
    return metrics


BROKEN = broken_run()
BROKEN_CONFIG = {"repeat_every": 7, "constant_reward": {"limit": 0.9}, "duplicates": {"patience": 2}}
BROKEN_ALARMS = alarms(BROKEN, **BROKEN_CONFIG)


def test_every_guard_speaks_in_the_run_that_is_resumed():
    assert {alarm.guard for alarm in BROKEN_ALARMS} == set(GUARDS)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, len(BROKEN)))
def test_a_resumed_run_raises_the_alarms_of_an_uninterrupted_one(cut):
    config = GuardsConfig.model_validate(BROKEN_CONFIG)
    before, after = Guards(config), Guards(config)
    raised = [alarm for line in BROKEN[:cut] for alarm in before.check(line)]
    state = before.state_dict()
    after.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
    assert after.state_dict() == state
    raised += [alarm for line in BROKEN[cut:] for alarm in after.check(line)]
    assert raised == BROKEN_ALARMS


def test_a_state_is_a_copy():
    guards = Guards(GuardsConfig())
    guards.check({"step": 1, NORM: 1.0})
    state = guards.state_dict()
    resumed = Guards(GuardsConfig())
    resumed.load_state_dict(state)
    for line in lines(NORM, [2.0, 3.0]):
        guards.check(line), resumed.check(line)
    assert state == {"grad_norm": {"num_bad": 0, "alarmed_at": None, "memory": {"values": [1.0]}}}


TEXTS = {alarm.guard: alarm.text for alarm in BROKEN_ALARMS} | {
    "kl, below": alarms(lines(KL, [0.0]), kl={"low": 0.1, "patience": 1})[0].text,
    "entropy, bound": alarms(lines("entropy", [0.0]), entropy={"low": 0.1, "patience": 1})[0].text,
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_names_step_metric_key_cause_and_remedy(name):
    guard, text = name.partition(",")[0], TEXTS[name]
    keys = {*known_keys(GuardsConfig, "guards."), *known_keys(Config)}
    named = set(re.findall(r"\b(?:guards|algorithm|roles|rollout|trainer|model|data|debug)\.[a-z_.]*[a-z_]", text))
    assert f"guards.{guard}" in named and any(key.startswith(f"guards.{guard}.") for key in named)
    assert named <= keys, f"no keys of the config: {named - keys}"
    assert re.match(rf"guards\.{guard}, step \d+", text) and "Usual causes: " in text
    assert any(f"{word} " in text for word in ("Try", "try"))


def test_a_text_has_the_value_and_its_bound():
    (alarm,) = alarms(lines(NORM, [2.0] * 10 + [25.0]), grad_norm={"factor": 12.0})
    expected = "grad_norm is 25, more than 12 times (guards.grad_norm.factor) its running median of 2."
    assert alarm.text.startswith(f"guards.grad_norm, step 11: {expected}")


def test_each_guard_has_a_section():
    assert set(GUARDS) == set(GuardsConfig.model_fields) - {"repeat_every"}


@pytest.mark.parametrize(
    "config",
    [
        {"kl": {"high": 0}},
        {"kl": {"action": "shout"}},
        {"truncated": {"limit": 1.5}},
        {"grad_norm": {"patience": 6}},  # the median would have followed
        {"short_responses": {"window": 9}},
        {"entropies": {}},
    ],
)
def test_wrong_sections_are_refused(config):
    with pytest.raises(ValidationError):
        GuardsConfig.model_validate(config)


def config_with(**sections):
    return Config.model_validate({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}} | sections)


@pytest.mark.parametrize(
    "low, high, keys",
    [(0.1, 1.0, []), (None, 1.0, []), (5.0, None, []), (1.0, 1.0, [("guards.kl.low", "guards.kl.high")])],
)
def test_a_band_without_width_is_refused(low, high, keys):
    config = config_with(guards={"kl": {"low": low, "high": high}})
    assert [violation.keys for violation in check_guards(config)] == keys


REWARDED = {"data": {"train": "t", "validation": "v"}, "trainer": {"steps": 10, "evaluate_every": 6}}
DISTILLED = {"algorithm": {"name": "distillation"}}
GUARDED = {
    name: {"patience": 2} for name in ("kl", "entropy", "mismatch", "reward_hacking", "duplicates", "constant_reward")
}


@pytest.mark.parametrize(
    "sections, guards",
    [
        (REWARDED, []),
        (REWARDED | {"trainer": {"steps": 10, "evaluate_every": 0}}, ["reward_hacking"]),
        (REWARDED | {"roles": {"reference": {"enabled": False}}}, ["kl"]),
        (REWARDED | {"algorithm": {"old_logprobs": "rollout"}}, ["entropy", "mismatch"]),
        (REWARDED | {"algorithm": {"name": "reinforce_plus_plus", "group_size": 1}}, ["duplicates"]),
        ({}, ["reward_hacking"]),
        (REWARDED | {"algorithm": {"name": "distillation", "reward": "gsm8k"}}, ["constant_reward"]),
        (REWARDED | DISTILLED, ["reward_hacking", "duplicates", "constant_reward"]),
    ],
)
def test_a_guard_that_could_never_speak_is_not_to_be_set_up(sections, guards):
    config = config_with(guards=GUARDED, **sections)
    blamed = {violation.keys[0].removesuffix(".patience") for violation in check_guards(config)}
    assert blamed == {f"guards.{name}" for name in guards}
    assert list(check_guards(config_with(**sections))) == []
