"""The estimate of GPU memory against what was measured on H200s, and what it says of layouts."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from config_folder import MOE, QWEN_0_5B, folder  # noqa: F401

from megarl.config import Config, describe, load
from megarl.engine.hf.flops import parameter_count
from megarl.memory_plan import (
    H200_BYTES,
    HOST_OPTIMIZER_BYTES,
    Memory,
    by_gpu,
    memory_rows,
    parameters,
    stages_of,
    trained_parameters,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from shapes import SHAPES  # noqa: E402

CLUSTER = ["device=cuda", "cluster.ray_address=auto"]
LAYOUTS = {
    "dp2": ["roles.actor.gpus_per_node=2"],
    "tp2": ["roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=2", "roles.actor.sequence_parallel=true"],
}


def with_model(folder: Path, hf: dict, *overrides: str) -> Config:
    (folder / "model" / "config.json").write_text(json.dumps(hf))
    return load("base.yaml", [*CLUSTER, *overrides])


def row(config: Config, role: str, phase: str) -> Memory:
    (found,) = [row for row in memory_rows(config, H200_BYTES) if (row.role, row.phase) == (role, phase)]
    return found


def trainer_cases() -> list[dict]:
    records = json.loads((ROOT / "benchmarks/results/trainer_2xh200.json").read_text())
    cases = [case for record in records for case in record["cases"]]
    return [case for case in cases if case["contender"] == "engine-te" and "peak_gb" in case]


def test_an_update_takes_what_the_trainer_took_at_dp_2_and_tp_2(folder):
    cases = trainer_cases()
    assert {(case["shape"], case["layout"]) for case in cases} == {
        (shape, layout) for shape in ("qwen2.5-1.5b", "qwen2.5-7b") for layout in LAYOUTS
    }
    for case in cases:  # in micro-batches of 4 x 2048 tokens
        overrides = [*LAYOUTS[case["layout"]], "roles.actor.max_tokens_per_gpu=8192"]
        config = with_model(folder, SHAPES[case["shape"]], *overrides)
        assert row(config, "actor", "update").tensors / 1e9 == pytest.approx(case["peak_gb"], rel=0.02), case


def test_the_phases_take_what_the_colocated_runs_took(folder):
    runs = json.loads((ROOT / "benchmarks/results/quickstart_gpu_h200.json").read_text())["runs"]
    for run in runs:
        given = [
            word for word in shlex.split(run["commands"][-1])[3:] if not word.startswith(("model.", "data.", "debug."))
        ]
        (folder / "model" / "config.json").write_text(json.dumps(SHAPES[run["shape"]]))
        paths = ["model.path=model", "data.train=train.jsonl", "cluster.ray_address=auto"]
        # These runs had the policy's and the reference's weights there one after the other.
        config = load(ROOT / "configs/quickstart_gpu.yaml", [*given, *paths, "roles.reference.enabled=false"])
        ((roles, phases),) = by_gpu(config, memory_rows(config, H200_BYTES))
        assert roles == "rollout + actor"
        first, last = run["steps"][0], run["steps"][-1]
        # After the first step the allocator's unused blocks count in `score`, which another phase would be given.
        measured = {phase: last[f"memory/{phase}_gpu_gb"] for phase in ("generate", "update")}
        measured["score"] = first["memory/score_gpu_gb"]
        assert {phase: held / 1e9 for phase, held in phases.items()} == pytest.approx(measured, rel=0.06), run["shape"]


@pytest.mark.parametrize("name", SHAPES)
def test_the_ranks_of_a_layout_hold_the_model_once(folder, name):
    fits = ["data.max_prompt_tokens=64", "rollout.sampling.max_new_tokens=64"]
    config = with_model(folder, SHAPES[name], *fits)
    (stage,) = stages_of(config, "actor")
    assert sum(parameters(stage)) == parameter_count(stage.shape)
    pipeline = with_model(folder, SHAPES[name], *fits, "roles.actor.gpus_per_node=2", "roles.actor.pipeline_parallel=2")
    again = SHAPES[name]["tie_word_embeddings"] * stage.shape.vocab_size * stage.shape.hidden_size  # on the last stage
    assert sum(sum(parameters(part)) for part in stages_of(pipeline, "actor")) == parameter_count(stage.shape) + again


def test_experts_are_spread_over_their_own_ranks(folder):
    layout = [
        f"roles.actor.{key}" for key in ("nodes=2", "gpus_per_node=8", "expert_parallel=4", "expert_tensor_parallel=2")
    ]
    whole, split = (stages_of(with_model(folder, MOE, *more), "actor")[0] for more in ([], layout))
    assert parameters(split)[0] == parameters(whole)[0]
    assert parameters(split)[1] == parameters(whole)[1] / 8
    update = row(with_model(folder, MOE, *layout), "actor", "update")
    dense, experts = parameters(split)
    assert update.optimizer == pytest.approx(12 * (dense / 16 + experts / 2))


def test_each_way_of_saving_memory_saves_its_part(folder):
    seven_b = SHAPES["qwen2.5-7b"]
    plain = row(with_model(folder, seven_b), "actor", "update")
    assert (plain.gradients, plain.optimizer) == (2 * plain.weights, 6 * plain.weights)
    host = row(with_model(folder, seven_b, "roles.actor.host_optimizer=true"), "actor", "update")
    assert host.optimizer == HOST_OPTIMIZER_BYTES and host.gradients == plain.gradients
    assert "\nPART_BYTES = 2**30" in (ROOT / "megarl/engine/host_optimizer.py").read_text()  # of which three are there
    kinds = ("none", "selective", "full")
    kept = [row(with_model(folder, seven_b, f"roles.actor.recompute={kind}"), "actor", "update") for kind in kinds]
    assert kept[0].activations > 1.5 * kept[1].activations > 3 * kept[2].activations
    config = with_model(folder, seven_b, "roles.actor.lora={rank: 16}")
    lora = row(config, "actor", "update")
    (stage,) = stages_of(config, "actor")
    sides = [(3584, 4608), (3584, 3584), (3584, 2 * 18944), (18944, 3584)]  # qkv, output, gate and up, down
    adapters = 28 * 16 * sum(map(sum, sides))
    assert trained_parameters(stage) == (adapters, 0)
    assert (lora.weights, lora.gradients, lora.optimizer) == (plain.weights + 2 * adapters, 4 * adapters, 12 * adapters)


def test_a_shorter_budget_than_a_sample_does_not_make_the_micro_batch_shorter(folder):
    lengths = ["data.max_prompt_tokens=1000", "rollout.sampling.max_new_tokens=3000"]
    longest, short = (
        row(with_model(folder, QWEN_0_5B, *lengths, f"roles.actor.max_tokens_per_gpu={budget}"), "actor", "update")
        for budget in (4000, 100)
    )
    assert longest == short


def test_a_critic_has_no_logits_and_no_output_layer(folder):
    config = with_model(folder, SHAPES["qwen2.5-7b"], "algorithm.name=ppo", "roles.critic={}")
    actor, critic = (row(config, role, "update") for role in ("actor", "critic"))
    assert critic.logits == 0 and actor.weights - critic.weights == 2 * 152064 * 3584


def test_shared_gpus_hold_scores_together_and_updates_in_turns(folder):
    overrides = [
        "placement=colocated",
        "algorithm.name=ppo",
        "roles.critic={}",
        "rollout.server_args.mem_fraction_static=0.5",
    ]
    config = with_model(folder, QWEN_0_5B, *overrides)
    rows = memory_rows(config, H200_BYTES)
    ((roles, phases),) = by_gpu(config, rows)
    assert roles == "rollout + actor + critic"
    of = {(row.role, row.phase): row.tensors for row in rows}
    processes = phases["score"] - of["actor", "score"] - of["critic", "score"]
    assert 0 < processes < 10e9
    assert phases["update"] == max(of["actor", "update"], of["critic", "update"]) + processes
    assert of["rollout", "generate"] > 0.49 * H200_BYTES
    config = with_model(folder, QWEN_0_5B, *overrides, "roles.actor.offload=optimizer", "roles.critic.offload=none")
    ((_, more),) = by_gpu(config, memory_rows(config, H200_BYTES))
    critic = row(config, "critic", "update")
    stays = critic.weights + critic.gradients + critic.optimizer
    assert more["generate"] - phases["generate"] == row(config, "actor", "update").weights + stays
    assert more["update"] == pytest.approx(of["actor", "update"] + stays + processes)
    apart = with_model(folder, QWEN_0_5B)
    assert [roles for roles, _ in by_gpu(apart, memory_rows(apart, H200_BYTES))] == ["rollout", "actor"]


def test_the_servers_options_count_and_those_without_a_number_are_left_to_sglang(folder):
    def server(args: str) -> Memory:
        return row(with_model(folder, QWEN_0_5B, f"rollout.server_args={args}"), "rollout", "generate")

    usual = server("{}")
    assert 0.85 * H200_BYTES < usual.weights + usual.kv_cache < 0.95 * H200_BYTES
    names = "chunked_prefill_size", "cuda_graph_max_bs", "mem_fraction_static", "max_total_tokens"
    assert server("{" + ", ".join(f"{name}: null" for name in names) + "}") == usual
    half = server("{mem_fraction_static: 0.5, chunked_prefill_size: 4096, cuda_graph_bs: [1, 8]}")
    assert half.weights + half.kv_cache == pytest.approx(0.5 * H200_BYTES, rel=0.02)
    assert usual.activations - half.activations == 4096 * 1.5 * 2**20 + (256 - 8) * 2**21
    assert (
        server("{max_total_tokens: 1000}").kv_cache == 1000 * 24 * 2 * 2 * 64 * 2
    )  # layers, K and V, heads, size, bytes


def test_the_description_says_what_does_not_fit_and_which_keys_make_it_less(folder):
    text = describe(with_model(folder, SHAPES["qwen2.5-7b"]))
    assert "update DOES NOT FIT, less by roles.ROLE.max_tokens_per_gpu, recompute, host_optimizer; more ranks" in text
    assert "of 150 GB, those of an H200: no GPU was asked" in text
    again = describe(with_model(folder, SHAPES["qwen2.5-7b"], "roles.actor.host_optimizer=true"))
    assert "DOES NOT FIT" not in again and "host memory of a node: actor 107 GB" in again


def test_other_layers_than_those_that_were_measured_are_said(folder):
    note = "the local ones keep two to three times as much"
    assert note not in describe(with_model(folder, QWEN_0_5B))
    assert note in describe(with_model(folder, QWEN_0_5B, "model.transformer_impl=local"))


def test_a_run_on_cpus_has_no_such_table(folder):
    assert "GPU memory" not in describe(load("base.yaml", []))
