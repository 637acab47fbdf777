"""O13 and its kind: a role's sizes against each other, the model, the device, refused with numbers and choices."""

import json
from pathlib import Path

import pytest
from config_folder import MOE, folder, only, refusal  # noqa: F401

from megarl.config import load


@pytest.fixture
def moe(folder):
    Path("model/config.json").write_text(json.dumps(MOE))


def actor(**settings) -> list[str]:
    return [f"roles.actor.{key}={json.dumps(value)}" for key, value in settings.items()]


@pytest.mark.parametrize("size", [3, 4, 7])
def test_tensor_parallel_must_divide_heads_and_groups(folder, size):
    assert only(refusal(*actor(tensor_parallel=size, gpus_per_node=size))) == (
        f"override roles.actor.tensor_parallel={size}: given {size}, but the model has 14 attention heads, 2 key/value "
        "heads and intermediate size 4864, and it must divide all of them (more ranks than key/value heads is not "
        "supported for a Megatron role); valid: 1, 2"
    )


DENSE_CASES = [
    (
        {"gpus_per_node": 3, "tensor_parallel": 2},
        "nodes * gpus_per_node = 1 * 3 = 3 is not divisible by tensor_parallel * context_parallel * pipeline_parallel "
        "= 2 * 1 * 1 = 2; nearest valid gpus_per_node: 2, 4",
    ),
    ({"tensor_parallel": 2}, "is not divisible by tensor_parallel"),
    (
        {"nodes": 2, "tensor_parallel": 2},
        "given 2, but the 1 gpus_per_node must hold whole tensor-parallel groups; valid: 1, or with "
        "roles.actor.tensor_parallel_across_nodes: true a multiple of 1",
    ),
    (
        {"nodes": 2, "gpus_per_node": 3, "tensor_parallel": 2, "tensor_parallel_across_nodes": True},
        "given 2, but the 3 gpus_per_node must hold whole tensor-parallel groups; valid: 1, 3, or with ",
    ),
    (
        {"pipeline_parallel": 5, "gpus_per_node": 5},
        "must divide the model's 24 layers; valid: 1, 2, 3, 4, 6, 8, 12, 24",
    ),
    (
        {"virtual_pipeline_parallel": 2},
        "given 2, but roles.actor.pipeline_parallel is 1: there is no pipeline to interleave",
    ),
    (
        {"pipeline_parallel": 2, "gpus_per_node": 2, "virtual_pipeline_parallel": 5},
        "given 5, but it must divide the 12 layers of a pipeline rank (24 layers / pipeline_parallel 2); valid: 1, 2, "
        "3, 4, 6, 12",
    ),
    ({"sequence_parallel": True}, "given true, but roles.actor.tensor_parallel is 1: there is nothing to split"),
    (
        {"context_parallel": 2, "gpus_per_node": 2},
        "needs transformer-engine's attention, and that runs on GPUs only, not with device: cpu; valid: 1",
    ),
    ({"expert_parallel": 2, "gpus_per_node": 2}, "given 2, but the model (qwen2) has no experts; valid: 1"),
    ({"expert_tensor_parallel": 2, "gpus_per_node": 2}, "given 2, but the model (qwen2) has no experts; valid: 1"),
    (
        {"recompute_modules": ["mlp"]},
        "given ['mlp'], but roles.actor.recompute is none; they are for selective",
    ),
    (
        {"recompute": "selective", "recompute_modules": ["moe"]},
        "given ['moe'], but the model (qwen2) has no experts; valid: core_attn, mlp",
    ),
]  # fmt: skip
MOE_CASES = [
    (
        {"expert_parallel": 3, "gpus_per_node": 3},
        "given 3, but it must divide the model's 8 experts; valid: 1, 2, 4, 8",
    ),
    (
        {"expert_parallel": 4, "gpus_per_node": 2},
        "expert_parallel * expert_tensor_parallel = 4 * 1 = 4 must divide the 2 ranks of a pipeline stage (world size "
        "2 / pipeline_parallel 1); valid products: 1, 2",
    ),
    (
        {"tensor_parallel": 2, "gpus_per_node": 2},
        "given false, but a model with experts needs it with tensor_parallel 2: each rank routes its own part of the "
        "tokens; valid: true",
    ),
    (
        {"expert_tensor_parallel": 2, "gpus_per_node": 2},
        "given 2 with expert_parallel 1 and tensor_parallel 1, but gloo gathers equal numbers of tokens only; valid on "
        "a CPU: 1",
    ),
    (
        {"recompute": "selective", "recompute_modules": ["mlp"]},
        "given ['mlp'], but the model (qwen3_moe) has experts in place of MLPs; valid: core_attn, moe",
    ),
]


def test_a_router_needs_experts_to_choose_from(folder):
    Path("model/config.json").write_text(json.dumps(MOE | {"num_experts_per_tok": 9}))
    line = only(refusal())
    assert "config.json has num_experts 8, num_experts_per_tok 9 and moe_intermediate_size 96: no model" in line


@pytest.mark.parametrize("given", [[], ["mpl"]])
def test_a_list_of_modules_without_or_with_unknown_ones_is_refused(folder, given):
    line = only(refusal(*actor(recompute="selective", recompute_modules=given)))
    assert line.endswith("allowed: a list of core_attn, mlp, moe of length >= 1, or null")


def test_expert_tensor_parallel_must_divide_an_experts_width(moe):
    on_gpu = ["device=cuda", "cluster.ray_address=auto"]
    assert only(refusal(*on_gpu, *actor(expert_tensor_parallel=5, gpus_per_node=5))).endswith(
        "given 5, but it must divide an expert's intermediate size 96; valid: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96"
    )
    load("base.yaml", [*on_gpu, *actor(expert_tensor_parallel=2, gpus_per_node=2)])


@pytest.mark.parametrize("settings, text", DENSE_CASES)
def test_what_a_dense_model_or_its_device_rules_out(folder, settings, text):
    assert text in only(refusal(*actor(**settings)))


@pytest.mark.parametrize("settings, text", MOE_CASES)
def test_what_a_model_with_experts_rules_out(moe, settings, text):
    assert text in only(refusal(*actor(**settings)))


def test_layouts_that_fit_are_accepted(folder):
    pipeline = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 3}
    load("base.yaml", actor(gpus_per_node=8, tensor_parallel=2, sequence_parallel=True, **pipeline))
    load("base.yaml", actor(recompute="selective", recompute_modules=["core_attn", "mlp"], offload="all"))
    load("base.yaml", actor(nodes=4, tensor_parallel=2, tensor_parallel_across_nodes=True))


def test_expert_layouts_that_fit_are_accepted(moe):
    load("base.yaml", actor(gpus_per_node=4, expert_parallel=2, pipeline_parallel=2))
    load("base.yaml", actor(gpus_per_node=4, tensor_parallel=2, sequence_parallel=True, expert_parallel=4))
    load("base.yaml", actor(gpus_per_node=4, tensor_parallel=2, sequence_parallel=True, expert_tensor_parallel=2))


@pytest.mark.parametrize(
    "overrides, text",
    [
        (["device=cpu"], "that runs on GPUs only, not with device: cpu; valid: auto, local"),
        (
            ["device=cuda", "cluster.ray_address=auto", "model.dtype=float32", "algorithm.name=sft"],
            "that needs model.dtype: bfloat16, given float32",
        ),
    ],
)
def test_transformer_engine_is_refused_with_the_reason(folder, overrides, text):
    assert text in only(refusal("model.transformer_impl=transformer_engine", *overrides))


def test_context_parallel_needs_transformer_engine_on_a_gpu_too(folder):
    gpu = ["device=cuda", "cluster.ray_address=auto", *actor(context_parallel=2, gpus_per_node=2)]
    load("base.yaml", gpu)
    line = only(refusal("model.transformer_impl=local", *gpu))
    assert "and model.transformer_impl: local rules it out; valid: 1" in line


def test_roles_have_layouts_of_their_own_and_each_is_checked(folder):
    lines = refusal("roles.critic.tensor_parallel=4", "roles.critic.gpus_per_node=4", *actor(gpus_per_node=2))
    assert len(lines) == 2 and "roles.critic.tensor_parallel=4: given 4" in lines[0]
    assert "roles.critic: given, but algorithm.advantage: grpo trains no critic" in lines[1]
