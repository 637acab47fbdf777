"""The config as a whole: defaults, the description, and the shipped files."""

from pathlib import Path

import pytest
import yaml
from config_folder import folder, refusal  # noqa: F401

from megarl.config import Config, check, describe, load
from megarl.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"


def test_defaults_and_the_name_come_from_the_schema_and_the_file(folder):
    config = load("base.yaml", [])
    assert config.name == "base"
    assert str(config.run_path) == "runs/base"
    assert config.algorithm.samples_per_update == config.algorithm.samples_per_step == 16 * 8
    assert load("base.yaml", ["name=other"]).name == "other"


def test_the_loaded_config_cannot_be_changed(folder):
    with pytest.raises(ValueError, match="frozen"):
        load("base.yaml", []).seed = 2


def test_the_description_is_a_config_again_and_shows_what_results(folder):
    overrides = ["algorithm.mini_batch_size=32", "roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=2"]
    config = load("base.yaml", [*overrides, "roles.actor.optimizer.betas=[0.8, 0.9]", "data.system_prompt='a: b'"])
    text = describe(config)
    Path("again.yaml").write_text(text)
    assert load("again.yaml", []) == config
    words = [" ".join(line.split()) for line in text.splitlines()]
    assert "# samples per step 128 (16 prompts x 8)" in words
    assert "# updates per step 4 (of 32 samples)" in words
    assert "# tokens per step at most 196,608 (1,536 per sample)" in words
    assert "# data parallel size 1 (world 2 / tensor 2 / context 1 / pipeline 1)" in words
    assert "# actor 1 x 2 ranks 0 1" in words
    assert "# rollout 1 x 1 ranks 0 1" in words
    assert "# needed 0 2" in words


def test_the_description_counts_gpus(folder):
    overrides = ["device=cuda", "cluster.ray_address=head:6379", "roles.actor.nodes=2", "rollout.servers=2"]
    words = [" ".join(line.split()) for line in describe(load("base.yaml", overrides)).splitlines()]
    assert "# actor 2 x 1 ranks 2 2" in words
    assert "# rollout 2 x 1 ranks 2 2" in words
    assert "# needed 4 4" in words


def test_quickstart_loads_where_nothing_was_written_yet(folder):
    config = load(CONFIGS / "quickstart.yaml", [])
    assert config.name == "quickstart"
    assert config.roles.actor.optimizer.learning_rate == 2e-4
    assert config.warm_start.optimizer.learning_rate == 6e-3
    assert config.toy is not None


def test_gsm8k_config_lacks_only_its_files(folder):
    lines = refusal(file=str(CONFIGS / "gsm8k_smollm2_135m.yaml"))
    assert [line.split(": ", 1)[1] for line in lines] == [
        "model.path: no such folder: models/smollm2-135m-instruct",
        "data.train: no such file: data/gsm8k/train.jsonl",
    ]


def test_check_names_keys_and_needs_no_file(folder):
    tree = yaml.safe_load(Path("base.yaml").read_text()) | {"name": "x", "algorithm": {"group_size": 1}}
    assert check(Config.model_validate(tree)) == [
        "algorithm.group_size: grpo needs group_size >= 2, given 1; reinforce_plus_plus does without groups"
    ]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configs_fit_the_schema(folder, file):
    try:
        load(file, [])
    except ConfigError as error:
        assert "unknown key" not in str(error)
        assert "allowed:" not in str(error)
