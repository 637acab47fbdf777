"""LoRA's settings are refused with the numbers and the choices where model or matrices do not allow them."""

import json
from pathlib import Path

import pytest
from config_folder import MOE, folder, only, refusal  # noqa: F401

from megarl.config import load


def actor_lora(**settings) -> str:
    return f"roles.actor.lora={json.dumps(settings)}"


def test_lora_is_off_unless_it_is_asked_for_and_has_defaults(folder):
    assert load("base.yaml", []).roles.actor.lora is None
    lora = load("base.yaml", [actor_lora()]).roles.actor.lora
    assert (lora.rank, lora.alpha, lora.scale, lora.targets) == (16, 32.0, 2.0, None)


@pytest.mark.parametrize("settings, key, text", [
    (
        {"targets": ["q_proj", "v_proj"]},
        "targets",
        "given [q_proj, v_proj], but q_proj, k_proj, v_proj are one matrix in Megatron, with one adapter; valid: all 3 "
        "of them, or none",
    ),
    (
        {"targets": ["o_proj", "up_proj"]},
        "targets",
        "given [o_proj, up_proj], but gate_proj, up_proj are one matrix in Megatron, with one adapter; valid: all 2 of "
        "them, or none",
    ),
    ({"targets": ["o_proj", "down_proj", "o_proj"]}, "targets", "o_proj given twice"),
    ({"rank": 897}, "rank", "given 897, but the smallest side of a matrix with an adapter is 896; valid: up to 896"),
    ({"rank": 0}, "rank", "given 0 (a whole number), allowed: a whole number >= 1"),
    ({"alpha": 0.0}, "alpha", "given 0.0 (a number), allowed: a number > 0"),
    ({"targets": []}, "targets", "of length >= 1, or null"),
    ({"targets": ["lm_head"]}, "targets", "allowed: a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, "),
])  # fmt: skip
def test_what_adapters_cannot_be_is_refused(folder, settings, key, text):
    line = only(refusal(actor_lora(**settings)))
    assert f"roles.actor.lora.{key}: " in line and text in line


def test_experts_take_no_adapters(folder):
    Path("model/config.json").write_text(json.dumps(MOE))
    assert only(refusal(actor_lora(targets=["o_proj", "down_proj"]))).endswith(
        "roles.actor.lora.targets: given [o_proj, down_proj], but the experts of the model (qwen3_moe) take no "
        "adapters; valid: q_proj, k_proj, v_proj, o_proj"
    )
    assert load("base.yaml", [actor_lora()]).roles.actor.lora.targets is None
