"""The config: what is read, what is refused, and that a refusal names the place, the numbers and the valid choices."""

import json
import socket
from pathlib import Path

import pytest
import yaml

from megarl.config import Config, check, describe, load, resolve_device
from megarl.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
QWEN_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a run: a model folder, a data file, and base.yaml that names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_0_5B))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "train.jsonl").touch()
    write("")
    return tmp_path


def write(text: str, name: str = "base.yaml") -> None:
    """The three lines that every config needs, then `text` from line 4 on."""
    Path(name).write_text("device: cpu\nmodel: {path: model}\ndata: {train: train.jsonl}\n" + text)


def refusal(*overrides: str, file: str = "base.yaml") -> list[str]:
    """The lines of the ConfigError that load raises, without the header of several."""
    with pytest.raises(ConfigError) as error:
        load(file, list(overrides))
    lines = str(error.value).splitlines()
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    return lines[1:] or lines


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


# Reading


def test_defaults_and_the_name_come_from_the_schema_and_the_file(folder):
    config = load("base.yaml", [])
    assert config.name == "base"
    assert str(config.run_path) == "runs/base"
    assert config.algorithm.samples_per_update == config.algorithm.samples_per_step == 16 * 8
    assert load("base.yaml", ["name=other"]).name == "other"


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1E5", 1e5), ("2.5e-3", 2.5e-3), ("1e+2", 100), ("1", 1)])
def test_numbers_without_a_dot_are_numbers_in_file_and_override(folder, text, value):
    write(f"warm_start: {{learning_rate: {text}}}\n")
    config = load("base.yaml", [f"roles.actor.optimizer.learning_rate={text}"])
    assert config.warm_start.learning_rate == value
    assert config.roles.actor.optimizer.learning_rate == value


def test_negative_exponent_numbers_are_numbers(folder):
    config = load("base.yaml", ["rollout.server_args={a: -2.5e-3, b: .5, c: 1_000, d: -7}"])
    assert config.rollout.server_args == {"a": -0.0025, "b": 0.5, "c": 1000, "d": -7}


def test_words_and_dates_stay_strings(folder):
    write("run_directory: no\n")
    assert load("base.yaml", []).run_directory == "no"
    assert load("base.yaml", ["run_directory=2026-01-01"]).run_directory == "2026-01-01"
    assert load("base.yaml", ["run_directory=1:30"]).run_directory == "1:30"


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
    write("rollout:\n  servers: 2\n  server_args: {a: 1, b: 2}\n")
    overrides = ["rollout={server_args: {b: 3}}", "toy={}", "data.answer_key=null", "rollout.server_args.c=x"]
    config = load("base.yaml", overrides)
    assert config.rollout.servers == 2
    assert config.rollout.server_args == {"a": 1, "b": 3, "c": "x"}
    assert config.toy.folder == "runs/toy"
    assert config.data.answer_key is None
    assert load("base.yaml", ["toy.seed=3"]).toy.seed == 3


def test_the_loaded_config_cannot_be_changed(folder):
    with pytest.raises(ValueError, match="frozen"):
        load("base.yaml", []).seed = 2


# Refusals of the file's form


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
    ("text", "place"),
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
    assert only(refusal()) == "base.yaml:8: rollout.server_args.list[0].a: given twice, first at base.yaml:7"


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


# O14: unknown and mistyped keys


def test_an_unknown_key_names_the_nearest_one_of_its_section(folder):
    write("roles:\n  actor:\n    optimizer:\n      lr_rate: 1e-6\n")
    line = "base.yaml:7: roles.actor.optimizer.lr_rate: unknown key (given 1e-6); did you mean learning_rate?"
    assert only(refusal()) == line


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("rollout.temprature=0.7", "rollout.sampling.temperature"),
        ("algorithm.kl=0.1", "algorithm.kl_coefficient"),
        ("roles.actor.lr_rate=1e-6", "roles.actor.optimizer.learning_rate"),
        ("roles.actor.optimizer.lr=1e-6", "roles.actor.optimizer.learning_rate"),
        ("roles.actor.tp=2", "roles.actor.tensor_parallel"),
        ("algorithm.clip=0.1", "algorithm.clip_low or algorithm.clip_high"),
        ("group_size=4", "algorithm.group_size"),
        ("learning_rate=1", "warm_start.learning_rate or roles.actor.optimizer.learning_rate"),
    ],
)
def test_an_unknown_override_names_the_nearest_whole_path(folder, override, hint):
    assert only(refusal(override)) == f"override {override}: unknown key; did you mean {hint}?"


def test_a_section_at_the_wrong_place_names_the_right_one(folder):
    write('actor:\n  lr: "1e-6"\n')
    assert only(refusal()) == "base.yaml:4: actor: unknown key (given lr: \"1e-6\"); did you mean roles.actor?"
    write("")
    assert only(refusal("actor.lr=1e-6")) == "override actor.lr=1e-6: actor: unknown key; did you mean roles.actor?"


def test_an_unknown_key_like_no_other_lists_the_valid_ones(folder):
    write("sync: {zzz: 1}\n")
    assert only(refusal()) == "base.yaml:4: sync.zzz: unknown key (given 1); valid keys of sync: bucket_mb, timeout_s"
    write("")
    assert "valid keys: name, run_directory, seed" in only(refusal("qqq=1"))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ('roles.actor.optimizer.learning_rate="1e-6"', 'given "1e-6" (a string), allowed: a number > 0'),
        ("roles.actor.optimizer.learning_rate=abc", "given abc (a string), allowed: a number > 0"),
        ("roles.actor.optimizer.learning_rate=.inf", "given .inf (a number), allowed: a number > 0"),
        ("roles.actor.optimizer.learning_rate=.nan", "given .nan (a number), allowed: a number > 0"),
        ("roles.actor.optimizer.learning_rate=true", "given true (a boolean), allowed: a number > 0"),
        ("algorithm.clip_low=1", "given 1 (a whole number), allowed: a number >= 0 and < 1"),
        ("trainer.steps=1.0", "given 1.0 (a number), allowed: a whole number >= 1"),
        ("trainer.steps=", "given null, allowed: a whole number >= 1"),
        ("trainer.steps=007", "given 007 (a string), allowed: a whole number >= 1"),
        ("algorithm.mini_batch_size=0", "given 0 (a whole number), allowed: a whole number >= 1, or null"),
        ("algorithm.normalize_by_std=yes", "given yes (a string), allowed: true or false"),
        ("device=gpu", "given gpu (a string), allowed: one of auto, cpu, cuda"),
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
        "base.yaml:8: algorithm.kl: unknown key (given 0.1); did you mean kl_coefficient?",
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


# O13: parallel sizes against the model


@pytest.mark.parametrize("size", [3, 4, 7])
def test_tensor_parallel_must_divide_heads_and_groups(folder, size):
    line = only(refusal(f"roles.actor.tensor_parallel={size}", f"roles.actor.gpus_per_node={size}"))
    assert line == (
        f"override roles.actor.tensor_parallel={size}: given {size}, but the model has 14 attention heads, 2 key/value "
        "heads and intermediate size 4864, and it must divide all three (more ranks than key/value heads is not "
        "supported for the actor); valid: 1, 2"
    )


def test_pipeline_parallel_must_divide_the_layers(folder):
    line = only(refusal("roles.actor.pipeline_parallel=5", "roles.actor.gpus_per_node=5"))
    assert "must divide the model's 24 layers; valid: 1, 2, 3, 4, 6, 8, 12, 24" in line


def test_rollout_tensor_parallel_must_divide_the_heads_and_may_copy_groups(folder):
    assert "given 4, but the model has 14 attention heads" in only(refusal("rollout.tensor_parallel=4"))
    assert only(refusal("rollout.tensor_parallel=7")).endswith("; valid: 1, 2")  # 7 and 2 groups: neither divides
    wide = QWEN_0_5B | {"num_attention_heads": 16}
    Path("model/config.json").write_text(json.dumps(wide))
    assert load("base.yaml", ["rollout.tensor_parallel=8"]).rollout.tensor_parallel == 8


def test_sizes_that_fit_are_accepted(folder):
    sizes = ["tensor_parallel=2", "pipeline_parallel=4", "gpus_per_node=8", "nodes=2"]
    config = load("base.yaml", [f"roles.actor.{size}" for size in sizes] + ["rollout.tensor_parallel=2"])
    assert config.roles.actor.data_parallel == 2


def test_the_world_must_be_a_multiple_of_tensor_times_pipeline(folder):
    line = only(refusal("roles.actor.gpus_per_node=3", "roles.actor.tensor_parallel=2"))
    assert line == (
        "override roles.actor.gpus_per_node=3: nodes * gpus_per_node = 1 * 3 = 3 is not divisible by tensor_parallel * "
        "pipeline_parallel = 2 * 1 = 2; nearest valid gpus_per_node: 2, 4"
    )


def test_a_tensor_parallel_group_stays_within_a_node(folder):
    lines = refusal("roles.actor.nodes=2", "roles.actor.tensor_parallel=2")
    assert only(lines).endswith("the 1 gpus_per_node must hold whole tensor-parallel groups; valid: 1")


# The model folder and the data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, qwen2"),
        ({"num_hidden_layers": None}, "no key 'num_hidden_layers'"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported for qwen2"),
    ],
)
def test_an_unsupported_model_is_refused(folder, content, reason):
    hf = {key: value for key, value in (QWEN_0_5B | content).items() if value is not None}
    Path("model/config.json").write_text(json.dumps(hf))
    line = only(refusal())
    assert line.startswith("base.yaml:2: model.path: ")
    assert line.endswith(reason)


def test_a_broken_model_folder_is_refused(folder):
    assert only(refusal("model.path=none")) == "override model.path=none: no such folder: none"
    Path("model/config.json").write_text("{\n,")
    assert "model/config.json:2: not valid JSON" in only(refusal())
    Path("model/config.json").unlink()
    assert only(refusal()) == "base.yaml:2: model.path: no config.json in model"


def test_weights_and_tokenizer_must_be_there(folder):
    Path("model/model.safetensors").unlink()
    Path("model/tokenizer.json").unlink()
    assert refusal() == [
        "base.yaml:2: model.path: no *.safetensors in model",
        "base.yaml:2: model.path: no tokenizer in model: tokenizer.json or tokenizer_config.json or tokenizer.model",
    ]
    Path("model/tokenizer.model").touch()
    only(refusal())


def test_prompt_and_response_must_fit_the_context(folder):
    load("base.yaml", ["data.max_prompt_tokens=32000", "rollout.sampling.max_new_tokens=768"])
    line = only(refusal("data.max_prompt_tokens=32000", "rollout.sampling.max_new_tokens=769"))
    assert "32000 + 769 = 32769 is more than the model's max_position_embeddings = 32768" in line


def test_data_files_must_exist(folder):
    lines = refusal("data.train=a.jsonl", "data.validation=model", "warm_start.data=c.jsonl")
    assert [line.split(": ")[-1] for line in lines] == ["a.jsonl", "model", "c.jsonl"]


def test_toy_files_need_not_exist_yet_but_must_be_ones_that_the_toy_writes(folder):
    toy = ["toy={}", "model.path=./runs/toy/model", "data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=16"]
    load("base.yaml", [*toy, "data.train=runs/toy/train.jsonl", "warm_start.data=runs/toy/warm_start.jsonl"])
    assert "no such file" in only(refusal(*toy, "data.train=runs/toy/trian.jsonl"))
    assert "4 attention heads, 2 key/value heads" in only(refusal(*toy, "rollout.tensor_parallel=3"))
    assert "no such folder" in only(refusal("model.path=runs/toy/model"))


# Algorithm and sampling


def test_grpo_needs_a_group(folder):  # O07
    assert only(refusal("algorithm.group_size=1")) == (
        "override algorithm.group_size=1: grpo needs group_size >= 2, given 1"
    )


def test_the_mini_batch_must_divide_the_step(folder):  # O12
    line = only(refusal("algorithm.prompts_per_step=3", "algorithm.group_size=2", "algorithm.mini_batch_size=5"))
    assert line == (
        "override algorithm.mini_batch_size=5: given 5, but algorithm.prompts_per_step * algorithm.group_size = 3 * 2 = "
        "6 is not a multiple of it; nearest valid mini_batch_size: 3, 6; nearest valid prompts_per_step: 5"
    )
    batch = {"prompts_per_step": 5, "group_size": 2, "mini_batch_size": 5}
    config = load("base.yaml", [f"algorithm.{key}={value}" for key, value in batch.items()])
    assert config.algorithm.samples_per_update == 5


def test_each_data_parallel_rank_needs_a_sample(folder):  # O12
    batch = ["algorithm.prompts_per_step=3", "algorithm.group_size=2"]
    load("base.yaml", [*batch, "roles.actor.gpus_per_node=4"])
    assert "an update has 6 samples" in only(refusal(*batch, "roles.actor.gpus_per_node=8"))
    line = only(refusal(*batch, "algorithm.mini_batch_size=3", "roles.actor.gpus_per_node=4"))
    assert "an update has 3 samples" in line
    assert "fewer than the 4 data-parallel ranks" in line


def test_sampling_that_cuts_the_distribution_is_refused(folder):
    lines = refusal("rollout.sampling.top_p=0.9", "rollout.sampling.top_k=40")
    assert "given 0.9, allowed for training: 1.0" in lines[0]
    assert "given 40, allowed for training: -1" in lines[1]


def test_a_kl_term_needs_the_reference(folder):
    load("base.yaml", ["algorithm.kl_coefficient=0.1"])
    load("base.yaml", ["roles.reference.enabled=false"])
    line = only(refusal("algorithm.kl_coefficient=0.1", "roles.reference.enabled=false"))
    assert line.endswith("given 0.1, but the KL term needs roles.reference.enabled: true")


def test_an_unknown_reward_lists_the_known_ones(folder):
    line = only(refusal("algorithm.reward=gms8k"))
    assert "given 'gms8k', valid: gsm8k, last_integer" in line


@pytest.mark.parametrize("name", ["''", "a/b", "..", ".hidden"])
def test_a_name_that_is_no_folder_name_is_refused(folder, name):
    assert "it names a folder" in only(refusal(f"name={name}"))


# Ports and device


def test_ports_are_counted_bounded_distinct_and_free(folder):
    assert "2 ports for 3 rollout.servers" in only(refusal("rollout.servers=3", "rollout.ports=[1025, 1026]"))
    assert "port 70000 is outside 1..65535" in only(refusal("rollout.ports=[70000]"))
    assert "port 40001 is given 2 times" in only(refusal("rollout.servers=2", "rollout.ports=[40001, 40001]"))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert only(refusal(f"rollout.ports=[{port}]")) == f"override rollout.ports=[{port}]: port {port} is in use"
    assert load("base.yaml", [f"rollout.ports=[{port}]"]).rollout.ports == [port]


def test_hidden_gpus_make_auto_the_cpu_and_cuda_an_error(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device(load("base.yaml", ["device=auto"])) == "cpu"
    assert "no GPU is seen with CUDA_VISIBLE_DEVICES=''" in only(refusal("device=cuda"))
    remote = load("base.yaml", ["device=cuda", "cluster.ray_address=head:6379"])  # its GPUs are not this machine's
    assert resolve_device(remote) == "cuda"


# describe and the shipped configs


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
    assert "# data parallel size 1 (world 2 / tensor 2 / pipeline 1)" in words
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
    assert config.warm_start.learning_rate == 6e-3
    assert config.toy is not None


def test_gsm8k_config_lacks_only_its_files(folder):
    lines = refusal(file=str(CONFIGS / "gsm8k_smollm2_135m.yaml"))
    assert [line.split(": ", 1)[1] for line in lines] == [
        "model.path: no such folder: models/smollm2-135m-instruct",
        "data.train: no such file: data/gsm8k/train.jsonl",
    ]


def test_check_names_keys_and_needs_no_file(folder):
    tree = yaml.safe_load(Path("base.yaml").read_text()) | {"name": "x", "algorithm": {"group_size": 1}}
    assert check(Config.model_validate(tree)) == ["algorithm.group_size: grpo needs group_size >= 2, given 1"]


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configs_fit_the_schema(folder, file):
    try:
        load(file, [])
    except ConfigError as error:
        assert "unknown key" not in str(error)
        assert "allowed:" not in str(error)
