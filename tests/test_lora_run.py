"""A run that trains adapters only, resumed, and exported both ways."""

import json

import pytest
from end_to_end import ROOT, Run, run_tool, untimed
from safetensors.torch import load_file

SFT = str(ROOT / "configs/quickstart_sft.yaml")
OVERRIDES = ("roles.actor.lora={rank: 4}", "roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=2",
             "trainer.steps=60", "trainer.save_every=40", "data.validation=null")  # fmt: skip


@pytest.mark.soak
def test_adapters_are_trained_resumed_and_exported_merged_or_alone(tmp_path):
    with Run(tmp_path, SFT, *OVERRIDES, "name=whole") as run:
        assert run.wait(300) == 0, run.output
    with Run(tmp_path, SFT, *OVERRIDES, "name=again", "--resume", "runs/whole/checkpoints/step_000040") as run:
        assert run.wait(300) == 0, run.output
    whole, again = (untimed(tmp_path / "runs" / name / "metrics.jsonl") for name in ("whole", "again"))
    assert whole[40:] == again and whole[-1]["sft/loss"] < 0.9 * whole[0]["sft/loss"]

    written = run_tool("convert_ckpt.py", "--to-hf", "runs/whole", "merged", "--verify", folder=tmp_path)
    assert "log-probs of 3 random sequences by transformers and by Megatron" in written
    run_tool("convert_ckpt.py", "--to-hf", "runs/whole", "adapter", "--lora", "peft", folder=tmp_path)
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["base_model_name_or_path"] == "runs/toy/model"
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("runs/toy/model", "merged"))
    adapters = load_file(tmp_path / "adapter/adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapters[f"base_model.model.{name}.lora_{which}.weight"] for which in "AB")
    change = merged[f"{name}.weight"] - base[f"{name}.weight"]
    assert change.abs().max() > 1e-3 and (change - settings["lora_alpha"] / 4 * b @ a).abs().max() < 1e-6
