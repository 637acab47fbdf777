"""O14: unknown keys, wrong types and wrong values, all at once, with the nearest key or what is allowed."""

import pytest
from config_folder import folder, only, refusal, write  # noqa: F401

from megarl.config import Config
from megarl.config_errors import known_keys
from megarl.config_other_names import OTHER_NAMES

KL = ("coefficient", "in", "estimator", "importance_weighted", "target", "horizon")
OPTIMIZED = ("warm_start", "roles.actor", "roles.critic")


def test_an_unknown_key_names_the_nearest_one_of_its_section(folder):
    write("roles:\n  actor:\n    optimizer:\n      lr_rate: 1e-6\n")
    line = "base.yaml:7: roles.actor.optimizer.lr_rate: unknown key (given 1e-6); did you mean learning_rate?"
    assert only(refusal()) == line


@pytest.mark.parametrize(
    "override, hint",
    [
        ("rollout.temprature=0.7", "rollout.sampling.temperature"),
        ("algorithm.kl=0.1", " or ".join(f"algorithm.kl_{name}" for name in KL)),
        ("roles.actor.lr_rate=1e-6", "roles.actor.optimizer.learning_rate"),
        ("roles.actor.optimizer.lr=1e-6", "roles.actor.optimizer.learning_rate"),
        ("roles.actor.tp=2", "roles.actor.tensor_parallel"),
        ("algorithm.clip=0.1", "algorithm.clip_low or algorithm.clip_high"),
        ("group_size=4", "algorithm.group_size"),
        ("learning_rate=1", " or ".join(f"{role}.optimizer.learning_rate" for role in OPTIMIZED)),
    ],
)
def test_an_unknown_override_names_the_nearest_whole_path(folder, override, hint):
    assert only(refusal(override)) == f"override {override}: unknown key; did you mean {hint}?"


def test_a_section_at_the_wrong_place_names_the_right_one(folder):
    write('actor:\n  lr: "1e-6"\n')
    assert only(refusal()) == 'base.yaml:4: actor: unknown key (given lr: "1e-6"); did you mean roles.actor?'
    write("")
    assert only(refusal("actor.lr=1e-6")) == "override actor.lr=1e-6: actor: unknown key; did you mean roles.actor?"


def test_an_unknown_key_like_no_other_lists_the_valid_ones(folder):
    write("sync: {zzz: 1}\n")
    valid = "bucket_mb, timeout_s, canary_diff_limit"
    assert only(refusal()) == f"base.yaml:4: sync.zzz: unknown key (given 1); valid keys of sync: {valid}"
    write("")
    assert "valid keys: name, run_directory, seed" in only(refusal("qqq=1"))


@pytest.mark.parametrize(
    "override, reason",
    [
        ('roles.actor.optimizer.learning_rate="1e-6"', 'given "1e-6" (a string), allowed: a number > 0'),
        ("roles.actor.optimizer.learning_rate=abc", "given abc (a string), allowed: a number > 0"),
        ("roles.actor.optimizer.learning_rate=.inf", "given .inf (a number), allowed: a finite number > 0"),
        ("roles.actor.optimizer.learning_rate=.nan", "given .nan (a number), allowed: a finite number > 0"),
        ("roles.actor.optimizer.learning_rate=true", "given true (a boolean), allowed: a number > 0"),
        ("algorithm.clip_low=2", "given 2 (a whole number), allowed: a number >= 0 and <= 1"),
        ("trainer.steps=1.0", "given 1.0 (a number), allowed: a whole number >= 1"),
        ("trainer.steps=", "given null, allowed: a whole number >= 1"),
        ("trainer.steps=007", "given 007 (a string), allowed: a whole number >= 1"),
        ("algorithm.mini_batch_size=0", "given 0 (a whole number), allowed: a whole number >= 1, or null"),
        ("algorithm.normalize_by_std=yes", "given yes (a string), allowed: true or false"),
        ("device=gpu", "given gpu (a string), allowed: one of auto, cpu, cuda"),
        ("device=CUDA", "given CUDA (a string), allowed: one of auto, cpu, cuda; did you mean cuda?"),
        ("rollout.ports=30000", "given 30000 (a whole number), allowed: a list of whole numbers, or null"),
        ("rollout.server_args=3", "given 3 (a whole number), allowed: a mapping"),
        ("trainer=3", "given 3 (a whole number), allowed: a section of keys"),
        ("model=3", "given 3 (a whole number), allowed: a section of keys"),
        ("model.path=3", "given 3 (a whole number), allowed: a string"),
        ("name=3", "given 3 (a whole number), allowed: a string"),
    ],
)
def test_a_wrong_type_or_value_says_what_is_allowed(folder, override, reason):
    assert only(refusal(override)) == f"override {override}: {reason}"


def test_an_empty_section_is_refused(folder):
    write("trainer:\n")
    assert only(refusal()) == "base.yaml:4: trainer: given null, allowed: a section of keys"


def test_all_violations_come_at_once(folder):
    write(
        "trainer:\n  steps: 1\n  steps: 2\nseed: -1\n"
        "algorithm: {group_size: 1, kl: 0.1}\nrollout: {tensor_parallel: 4}\n"
    )
    lines = refusal("rollout.temprature=0.7", "data.train=none.jsonl", "name")
    starts = [
        "override name: key.path=value is expected",
        "base.yaml:6: trainer.steps: given twice",
        "base.yaml:7: seed: given -1 (a whole number), allowed: a whole number >= 0",
        "base.yaml:8: algorithm.kl: unknown key (given 0.1); did you mean kl_coefficient",
        "override rollout.temprature=0.7: unknown key",
        "base.yaml:9: rollout.tensor_parallel: given 4",
        "override data.train=none.jsonl: no such file: none.jsonl",
        "base.yaml:8: algorithm.group_size: grpo needs group_size >= 2, given 1",
    ]
    assert len(lines) == len(starts)
    for start in starts:
        assert any(line.startswith(start) for line in lines), (start, lines)


def test_a_check_that_rests_on_a_broken_key_is_left_out(folder):
    only(refusal("algorithm.mini_batch_size=x", "algorithm.prompts_per_step=16"))
    only(refusal("algorithm.group_sise=1", "algorithm.mini_batch_size=5"))  # what group_size was meant is not known
    only(refusal("model.path=3", "rollout.tensor_parallel=4"))


def test_what_verl_and_slime_call_a_key_names_ours(folder):
    known = set(known_keys(Config))
    assert set(OTHER_NAMES.values()) <= known
    assert not OTHER_NAMES.keys() & {key.rpartition(".")[2] for key in known}
    line = only(refusal("data.train_batch_size=8"))
    assert line == "override data.train_batch_size=8: unknown key; did you mean algorithm.prompts_per_step?"
