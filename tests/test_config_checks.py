"""Keys against each other, the model folder, the files, the machine: refused with numbers and valid choices."""

import json
import socket
from pathlib import Path

import pytest
from config_folder import QWEN_0_5B, folder, only, refusal  # noqa: F401

from megarl.config import load
from megarl.machine import resolve_device


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


# The model folder and the data


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
        ({"num_hidden_layers": None}, "no key 'num_hidden_layers'"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported for qwen2"),
    ],
)
def test_an_unsupported_model_is_refused(folder, content, reason):
    hf = {key: value for key, value in (QWEN_0_5B | content).items() if value is not None}
    Path("model/config.json").write_text(json.dumps(hf))
    line = only(refusal())
    assert line.startswith("base.yaml:2: model.path: ")
    assert reason in line


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
        "base.yaml:2: model.path: no tokenizer in model: tokenizer.json or tokenizer.model or vocab.json",
    ]
    Path("model/tokenizer.model").touch()
    only(refusal())


def test_prompt_and_response_must_fit_the_context(folder):
    load("base.yaml", ["data.max_prompt_tokens=32000", "rollout.sampling.max_new_tokens=768"])
    line = only(refusal("data.max_prompt_tokens=32000", "rollout.sampling.max_new_tokens=769"))
    assert "32000 + 769 = 32769 is more than the model's max_position_embeddings = 32768" in line


def test_data_files_must_exist(folder):
    no_name = "x" * 256  # longer than a file's may be
    lines = refusal("data.train=a.jsonl", f"data.validation=[model, {no_name}]", "warm_start.data=c.jsonl")
    assert [line.split(": ")[-1] for line in lines] == ["a.jsonl", "model", no_name, "c.jsonl"]


def test_a_chat_template_that_looks_like_a_file_must_be_one(folder):
    for template in ("templates/own", "own.jinja"):
        assert only(refusal(f"data.chat_template={template}")).endswith(f"no such file: {template}")
    Path("own.jinja").touch()
    for template in ("own.jinja", "chatml", "tool_use"):
        assert load("base.yaml", [f"data.chat_template={template}"]).data.chat_template == template


def test_a_column_is_read_as_one_thing(folder):
    assert "given prompt, which data.prompt_key names already" in only(refusal("data.tools_key=prompt"))
    assert load("base.yaml", ["data.tools_key=null", "data.answer_key=null"]).data.tools_key is None


def test_toy_files_need_not_exist_yet_but_must_be_ones_that_the_toy_writes(folder):
    toy = ["toy={}", "model.path=./runs/toy/model", "data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=16"]
    load("base.yaml", [*toy, "data.train=runs/toy/train.jsonl", "warm_start.data=runs/toy/warm_start.jsonl"])
    assert "no such file" in only(refusal(*toy, "data.train=runs/toy/trian.jsonl"))
    assert "4 attention heads, 2 key/value heads" in only(refusal(*toy, "rollout.tensor_parallel=3"))
    assert "no such folder" in only(refusal("model.path=runs/toy/model"))


# Algorithm and sampling


def test_grpo_needs_a_group(folder):  # O07
    assert only(refusal("algorithm.group_size=1")) == (
        "override algorithm.group_size=1: grpo needs group_size >= 2, given 1; reinforce_plus_plus does without groups"
    )


def test_the_mini_batch_must_divide_the_step(folder):  # O12
    line = only(refusal("algorithm.prompts_per_step=3", "algorithm.group_size=2", "algorithm.mini_batch_size=5"))
    assert line == (
        "override algorithm.mini_batch_size=5: given 5, but algorithm.prompts_per_step * algorithm.group_size = "
        "3 * 2 = 6 is not a multiple of it; nearest valid mini_batch_size: 3, 6; nearest valid prompts_per_step: 5"
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
    assert "given 'gms8k', valid: " in line
    assert "gsm8k" in line.split("valid: ")[1]


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
        elsewhere = ["cluster.ray_address=head:6379", "device=cpu"]
        load("base.yaml", [f"rollout.ports=[{port}]", *elsewhere])
    assert load("base.yaml", [f"rollout.ports=[{port}]"]).rollout.ports == [port]


def test_hidden_gpus_make_auto_the_cpu_and_cuda_an_error(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device(load("base.yaml", ["device=auto"])) == "cpu"
    assert "no GPU is seen with CUDA_VISIBLE_DEVICES=''" in only(refusal("device=cuda"))
    remote = load("base.yaml", ["device=cuda", "cluster.ray_address=head:6379"])  # its GPUs are not this machine's
    assert resolve_device(remote) == "cuda"


# The algorithm


def test_a_key_that_the_chosen_parts_do_not_read_is_refused(folder):
    line = only(refusal("algorithm.name=rloo", "algorithm.normalize_by_std=false"))
    assert line.endswith("given false, but only algorithm.advantage: grpo reads it, and that is rloo; valid: true")
    assert "only algorithm.policy_loss: dual_clip reads it" in only(refusal("algorithm.dual_clip=2.0"))
    assert "only algorithm.loss_aggregation: constant reads it" in only(refusal("algorithm.aggregation_length=100"))
    load("base.yaml", ["algorithm.name=dr_grpo", "algorithm.aggregation_length=100"])


def test_gspo_wants_clip_ranges_of_its_own(folder):
    line = only(refusal("algorithm.policy_loss=gspo"))
    assert "0.2 stops nothing (the paper has 3e-4 and 4e-4); at most 0.05" in line
    load("base.yaml", ["algorithm.policy_loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"])


def test_only_an_estimator_without_groups_takes_a_group_of_one(folder):
    one = ["algorithm.group_size=1", "algorithm.prompts_per_step=64"]
    load("base.yaml", [*one, "algorithm.name=reinforce_plus_plus"])
    for name in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"):
        assert f"{name} needs group_size >= 2, given 1" in only(refusal(*one, f"algorithm.name={name}"))


# The cluster and the placement


def test_a_remote_clusters_device_is_told_and_its_address_is_one_of_a_head(folder):
    line = only(refusal("cluster.ray_address=head:6379", "device=auto"))
    assert line.endswith("say nothing of the cluster at head:6379; valid: cpu, cuda")
    for address in ("ray://head:10001", "local", "''", "head"):
        assert "valid: HOST:PORT of a Ray head" in only(refusal(f"cluster.ray_address={address}", "device=cpu"))
    for address in ("head:6379", "10.0.0.7:6379", "[fd00::1]:6379", "auto"):
        load("base.yaml", [f"cluster.ray_address={address!r}", "device=cpu"])


def test_servers_that_share_the_actors_gpus_fit_them(folder):
    colocated = ["placement=colocated", "roles.actor.gpus_per_node=2"]
    load("base.yaml", [*colocated, "rollout.servers=2"])
    load("base.yaml", [*colocated, "rollout.tensor_parallel=2", "roles.actor.offload=none"])
    line = only(refusal(*colocated, "rollout.servers=3"))
    assert "servers * tensor_parallel = 3 * 1 = 3, but" in line and line.endswith("roles.actor.gpus_per_node = 2")
    assert only(refusal(*colocated, "roles.actor.nodes=2")).endswith("inside one machine; valid: 1")
    ppo = [*colocated, "algorithm.name=ppo"]
    load("base.yaml", [*ppo, "roles.critic={gpus_per_node: 2, tensor_parallel: 2}"])
    assert only(refusal(*ppo, "roles.critic.gpus_per_node=3")).endswith("shares the GPUs of the actor, which has 2")


def test_checksums_need_gpus(folder):
    assert "SGLang's weights_checker works on GPUs only" in only(refusal("debug.sync_checksum=true", "device=cpu"))
    load("base.yaml", ["debug.sync_checksum=true", "device=cuda", "cluster.ray_address=auto"])


# Optimizers


def test_a_warmup_longer_than_the_run_is_refused(folder):
    load("base.yaml", ["roles.actor.optimizer.warmup_steps=100", "trainer.steps=100"])
    assert only(refusal("roles.actor.optimizer.warmup_steps=101", "trainer.steps=100")) == (
        "override roles.actor.optimizer.warmup_steps=101: given 101, but the peak would not be reached in "
        "trainer.steps = 100"
    )
    rising = ["roles.actor.optimizer.warmup_steps=100", "roles.actor.optimizer.schedule=cosine", "trainer.steps=100"]
    assert "trainer.steps = 100 leaves no step for schedule: cosine to fall in" in only(refusal(*rising))
    short = only(refusal("warm_start.steps=20", "warm_start.data=train.jsonl"))
    assert "given 30, but the peak would not be reached in warm_start.steps" in short


def test_a_constant_rate_has_no_end_to_fall_to(folder):
    line = only(refusal("roles.actor.optimizer.final_fraction=0.5"))
    assert line.endswith("given 0.5, but roles.actor.optimizer.schedule is constant; linear and cosine fall")
    load("base.yaml", ["roles.actor.optimizer.final_fraction=0.5", "roles.actor.optimizer.schedule=linear"])


@pytest.mark.parametrize("section", ["roles.actor", "roles.critic", "warm_start"])
def test_the_settings_of_every_optimizer_are_checked(folder, section):
    data = ["warm_start.data=train.jsonl"] if section == "warm_start" else []
    lines = refusal(f"{section}.optimizer.betas=[0.8, 1.0]", f"{section}.optimizer.warmup_steps=1000", *data)
    lines = [line for line in lines if "trains no critic" not in line]
    assert lines[0].endswith("allowed: two numbers >= 0 and < 1") and "given 1000, but the peak" in lines[1]


def test_servers_on_gpus_take_no_float32(folder):
    on_gpus = ["device=cuda", "cluster.ray_address=auto", "model.dtype=float32"]
    line = only(refusal(*on_gpus))
    assert line.endswith("given float32, but SGLang's kernels take none on GPUs; valid: bfloat16, or device: cpu")
    load("base.yaml", [*on_gpus, "algorithm.name=sft"])
    load("base.yaml", ["model.dtype=float32"])


def test_repeatable_samples_need_a_gpu_and_kernels_that_allow_them(folder, monkeypatch):
    key = "rollout.deterministic"
    assert "given true, but SGLang's batch-invariant kernels run on GPUs only" in only(refusal(f"{key}=true"))
    alone = "rollout.server_args={enable_deterministic_inference: true}"
    assert f"set {key}: true" in only(refusal(alone))
    monkeypatch.setattr("megarl.config_checks.resolve_device", lambda config: "cuda")
    args = "{sampling_backend: flashinfer, attention_backend: torch_native, chunked_prefill_size: 512}"
    found = refusal(f"{key}=true", f"rollout.server_args={args}", "model.dtype=bfloat16")
    assert len(found) == 3
    for text in (
        "valid with rollout.deterministic: pytorch",
        "fa3, fa4, flashinfer, triton",
        "given 512, but a longer",
    ):
        assert sum(text in line for line in found) == 1
    long = refusal(f"{key}=true", "model.dtype=bfloat16", "rollout.sampling.max_new_tokens=200000")
    assert any(", allowed with rollout.deterministic: " in line for line in long)


def test_what_needs_validations_or_excludes_each_other_is_refused(folder):
    for given, text in {
        "trainer.early_stop={}": "without data.validation there are no validations",
        "checkpoint.keep_best=2": "without data.validation there are no validations",
        "checkpoint.metric=reward/mean": "it names a metric of a validation",
        "checkpoint.keep_every=5": "checkpoint.keep_last is null: all checkpoints stay",
        "checkpoint.roles={actor: false}": "nothing would be saved",
        "debug.generate_only=true": "it needs a folder in rollout.save",
    }.items():
        assert any(text in line for line in refusal(given)), (given, refusal(given))
    rarely = refusal("checkpoint.keep_best=2", "data.validation=train.jsonl")
    assert "trainer.evaluate_every is 0: there are validations before and after the run only" in only(rarely)
    both = refusal("rollout.save=a", "rollout.replay=a")
    assert "with rollout.replay nothing is generated" in only(both)
