"""Reading a config: YAML as people write it, overrides, and what is refused with file and line."""

from pathlib import Path

import pytest
from config_folder import folder, only, refusal, write  # noqa: F401

from megarl.config import load
from megarl.config_file import dump


@pytest.mark.parametrize("text, value", [("1e-6", 1e-6), ("1E5", 1e5), ("2.5e-3", 2.5e-3), ("1e+2", 100), ("1", 1)])
def test_numbers_without_a_dot_are_numbers_in_file_and_override(folder, text, value):
    write(f"roles: {{actor: {{optimizer: {{clip_grad: {text}}}}}}}\n")
    config = load("base.yaml", [f"roles.actor.optimizer.learning_rate={text}"])
    assert config.roles.actor.optimizer.clip_grad == value
    assert config.roles.actor.optimizer.learning_rate == value


def test_negative_exponent_numbers_are_numbers(folder):
    values = "{schedule_conservativeness: -2.5e-3, mem_fraction_static: .5, max_total_tokens: 1_000, random_seed: -7}"
    config = load("base.yaml", [f"rollout.server_args={values}"])
    assert list(config.rollout.server_args.values()) == [-0.0025, 0.5, 1000, -7]


def test_words_and_dates_stay_strings(folder):
    write("run_directory: no\n")
    assert load("base.yaml", []).run_directory == "no"
    assert load("base.yaml", ["run_directory=2026-01-01"]).run_directory == "2026-01-01"
    assert load("base.yaml", ["run_directory=1:30"]).run_directory == "1:30"


@pytest.mark.parametrize("text", ["1e6", "-1E-5", "1_000", "0x10", "1:30", "no", "on", "null", "", ".nan", "größe"])
def test_strings_that_look_like_something_else_are_written_as_strings(folder, text):
    config = load("base.yaml", [f'run_directory="{text}"', f'rollout.server_args={{chat_template: "{text}"}}'])
    assert config.run_directory == config.rollout.server_args["chat_template"] == text
    Path("again.yaml").write_text(dump(config.model_dump(mode="json")), encoding="utf-8")
    assert load("again.yaml") == config


def test_a_list_is_accepted_for_the_betas_but_its_items_stay_strict(folder):
    write("roles: {actor: {optimizer: {betas: [0.8, 0.99]}}}\n")
    assert load("base.yaml", []).roles.actor.optimizer.betas == (0.8, 0.99)
    assert only(refusal("roles.actor.optimizer.betas=['0.8', x]")).endswith(
        ": given ['0.8', x] (a list), allowed: a list of 2 numbers"
    )
    for wrong in ("[0.8]", "[0.8, 0.9, 0.9]", "0.8"):
        assert "allowed: a list of 2 numbers" in only(refusal(f"roles.actor.optimizer.betas={wrong}"))
    assert only(refusal("roles.actor.optimizer.betas=[0.8, 1.0]")).endswith("allowed: two numbers >= 0 and < 1")


def test_overrides_replace_values_and_add_to_mappings(folder):
    write("rollout:\n  servers: 2\n  server_args: {log_level: info, random_seed: 2}\n")
    overrides = ["rollout={server_args: {random_seed: 3}}", "toy={}", "data.answer_key=null"]
    config = load("base.yaml", [*overrides, "rollout.server_args.quantization=fp8"])
    assert config.rollout.servers == 2
    assert config.rollout.server_args == {"log_level": "info", "random_seed": 3, "quantization": "fp8"}
    assert config.toy.folder == "runs/toy"
    assert config.data.answer_key is None
    assert load("base.yaml", ["toy.seed=3"]).toy.seed == 3


def test_a_missing_file_a_folder_and_bytes_are_refused(folder):
    assert only(refusal(file="none.yaml")) == "none.yaml: cannot read the config file: No such file or directory"
    assert "Is a directory" in only(refusal(file="model"))
    Path("bytes.yaml").write_bytes(b"name: \xff\n")
    assert only(refusal(file="bytes.yaml")).startswith("bytes.yaml: not UTF-8 text")


def test_an_empty_file_lacks_the_required_keys(folder):
    Path("empty.yaml").write_text("# nothing\n")
    assert refusal(file="empty.yaml") == [
        "empty.yaml: model.path: missing, a required key",
        "empty.yaml: data.train: missing, a required key",
    ]


@pytest.mark.parametrize(
    "text, place",
    [("seed: 1\n  steps: 2\n", ":5: "), ("seed: [1\n", ":5: "), ("a: &x 1\nb: *x\n", ":5: "), ("seed: \t@\n", ":4: ")],
)
def test_yaml_errors_name_the_line(folder, text, place):
    write(text)
    assert only(refusal()).startswith(f"base.yaml{place}not valid YAML: ")


def test_a_file_that_is_no_mapping_is_refused(folder):
    Path("list.yaml").write_text("- 1\n- 2\n")
    assert only(refusal(file="list.yaml")) == "list.yaml:1: a mapping of keys is expected, given - 1 - 2"


def test_a_duplicate_key_is_refused_with_both_lines(folder):
    write("trainer:\n  steps: 1\n  save_every: 1\n  steps: 1\n")
    assert only(refusal()) == "base.yaml:7: trainer.steps: given twice, first at base.yaml:5"
    write("rollout:\n  server_args:\n    list:\n    - a: 1\n      a: 2\n")
    assert refusal()[0] == "base.yaml:8: rollout.server_args.list[0].a: given twice, first at base.yaml:7"


def test_dotted_and_non_string_keys_in_the_file_are_refused(folder):
    write("trainer.steps: 1\n2: 3\n")
    assert refusal() == [
        "base.yaml:4: trainer.steps: a key is a plain name; nest sections instead of dots",
        "base.yaml:5: 2: a key is a plain name; nest sections instead of dots",
    ]


def test_malformed_overrides_are_refused(folder):
    assert refusal("trainer.steps", "=3", "seed=[1", "model.path.x=1", "trainer.steps=3", "trainer.steps=4") == [
        "override trainer.steps: key.path=value is expected",
        "override =3: key.path=value is expected",
        "override seed=[1: the value is not valid YAML: while parsing a flow sequence, "
        "expected ',' or ']', but got '<stream end>'",
        "override model.path.x=1: model.path is a value, not a section",
        "override trainer.steps=4: trainer.steps is overridden twice, first by trainer.steps=3",
    ]
