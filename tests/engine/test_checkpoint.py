"""Checkpoint at one layout -> HF folder -> transformers: equal logits (O17, O18)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.errors import ConfigError
from megarl.sample import Prompt, Sample

TOOL = Path(__file__).parents[2] / "tools" / "convert_ckpt.py"
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 9]


def train_and_save(rank, model, folder):
    """Log-probs after one step, and the step's checkpoint."""
    from megarl.engine import checkpoint

    engine = make_engine(model)
    engine.use_optimizer(OptimizerConfig())
    samples = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
    engine.train_step(samples, sft_loss, 1e-2)
    checkpoint.save(engine, model, folder)
    return {i: x[0].tolist() for i, x in engine.logprobs(samples, 1.0).items()}


@pytest.mark.parametrize("family, tied", [("qwen2", False), ("llama", True)])
def test_exported_folder_gives_equal_logprobs_in_transformers(tmp_path, family, tied):
    from transformers import AutoModelForCausalLM

    model = write_hf_model(tmp_path / "model", family, tied, vocab_size=101, num_layers=2)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))  # as released; trained in float32
    run = tmp_path / "run"
    results = run_ranks(
        train_and_save, 4, model, run / "checkpoints" / "step_000007", tensor_parallel=2, pipeline_parallel=2
    )
    shutil.rmtree(model)  # a checkpoint needs nothing beside itself
    about = run / "checkpoints" / "step_000007" / "megarl.json"
    assert json.loads(about.read_text()) == {"dtype": "float32", "head": "lm"}
    if tied:  # one that names no head is of a language model
        about.write_text('{"dtype": "float32"}')
    export = [sys.executable, TOOL, "--to-hf", run, tmp_path / "out", "--max-shard-size", "50KB"]
    subprocess.run(export, check=True, timeout=300)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2

    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 101 and config["tie_word_embeddings"] is tied
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.get_input_embeddings().weight.shape[0] == 101
    logprobs = {i: values for result in results for i, values in result.items()}
    for i, ids in enumerate(SEQUENCES):
        logits = exported(torch.tensor([ids])).logits[0]
        expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        torch.testing.assert_close(torch.tensor(logprobs[i][1:]), expected.detach(), atol=1e-5, rtol=0)

    again = subprocess.run([sys.executable, TOOL, "--to-hf", run, tmp_path / "out"], capture_output=True, text=True, timeout=300)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_export_of_a_folder_without_checkpoint_is_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, TOOL, "--to-hf", tmp_path, tmp_path / "out"], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 2 and "neither a checkpoint nor a run directory" in result.stderr


def test_of_a_run_that_was_interrupted_the_finished_steps_are_exported_and_else_a_checkpoint_must_be_named(tmp_path):
    from megarl.engine.hf.export import find_checkpoint

    interrupted, finished = (tmp_path / "checkpoints" / name for name in ("interrupted_000007", "step_000005"))
    interrupted.mkdir(parents=True)
    (interrupted / "megarl.json").touch()
    with pytest.raises(ConfigError, match=f"only interrupted_000007: give {interrupted} to export it"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(interrupted) == interrupted
    finished.mkdir()
    (finished / "megarl.json").touch()
    assert find_checkpoint(tmp_path) == finished


def names_on_disk(rank, model):
    """The keys of a checkpoint."""
    from megarl.engine import checkpoint

    return sorted({tensor.key for tensor in checkpoint._state(make_engine(model))["chunk_0"].values()})


def test_norms_are_stored_under_the_names_of_transformer_engine_layers(tmp_path):
    """Which have a dense layer's norms inside its linear layers, and the one before experts by itself."""
    for family, mlp_norm in [("qwen2", "mlp.linear_fc1.layer_norm_weight"), ("qwen3_moe", "pre_mlp_layernorm.weight")]:
        model = write_hf_model(tmp_path / family, family, True, num_layers=2)
        (keys,) = run_ranks(names_on_disk, 1, model)
        norms = [key for key in keys if "norm" in key and "q_layer" not in key and "k_layer" not in key]
        layers = [f"decoder.layers.{name}" for name in (mlp_norm, "self_attention.linear_qkv.layer_norm_weight")]
        assert norms == ["decoder.final_layernorm.weight", *sorted(layers)]


def exchange_with_extra_state(rank, model, folder):
    """Log-probs before a save and after two loads, where the norms have transformer-engine's extra state at first, then
    not, then again."""
    from megarl.engine import checkpoint
    from megarl.engine.modules import RMSNorm

    samples = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
    scored = []
    for step, has_extra_state in enumerate([True, False, True]):
        if has_extra_state:
            RMSNorm.get_extra_state, RMSNorm.set_extra_state = (lambda self: torch.empty(0)), (lambda self, state: None)
        else:
            del RMSNorm.get_extra_state, RMSNorm.set_extra_state
        engine = make_engine(model)
        assert ("decoder.final_layernorm._extra_state" in engine.chunks[0].state_dict()) == has_extra_state
        if step:
            with torch.no_grad():
                for parameter in engine.parameters():
                    parameter.fill_(0.5)
            checkpoint.load(engine, Path(folder, str(step - 1)))
        checkpoint.save(engine, model, Path(folder, str(step)))
        scored.append({i: x[0].tolist() for i, x in engine.logprobs(samples, 1.0).items()})
    return scored


def test_layers_with_and_without_extra_state_read_each_others_checkpoints(tmp_path):
    model = write_hf_model(tmp_path / "model", "qwen3_moe", False, vocab_size=101, num_layers=2)
    ((first, second, third),) = run_ranks(exchange_with_extra_state, 1, model, tmp_path)
    assert first == second == third and len(first) == len(SEQUENCES)


TP2_PP2 = {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}
VPP2 = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
RESHARDED = {  # family, head, saved under, loaded under: number of ranks, RoleConfig
    "dense to one rank": ("qwen2", "lm", (4, TP2_PP2), (1, {})),
    "dense to interleaved": ("qwen2", "lm", (4, TP2_PP2), (2, VPP2)),
    "interleaved to data parallel": ("llama", "lm", (2, VPP2), (2, {})),
    "one rank to tensor parallel": ("qwen3", "lm", (1, {}), (2, {"tensor_parallel": 2})),
    "experts gathered": ("qwen3_moe", "lm", (2, {"expert_parallel": 2}), (1, {})),
    "experts spread": ("qwen3_moe", "lm", (2, VPP2), (2, {"expert_parallel": 2})),
    "value head": ("qwen2", "value", (2, {"tensor_parallel": 2, "sequence_parallel": True}), (2, {"pipeline_parallel": 2})),
}


def scores_after(rank, model, head, role, folder, save):
    """Log-probs or values of the engine: after one step and a save, or after a load."""
    from megarl.engine import checkpoint
    from megarl.engine.engine import Engine

    settings = CriticConfig(value_head_std=0.3, **role)
    engine = Engine(ModelConfig(path=str(model), dtype="float32"), settings, head)
    samples = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
    if save:
        engine.use_optimizer(OptimizerConfig())
        engine.train_step(samples, sft_loss, 1e-2)
        checkpoint.save(engine, model, folder)
    else:
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.fill_(0.5)
        checkpoint.load(engine, folder)
    scored = engine.values(samples) if head == "value" else {i: x[0] for i, x in engine.logprobs(samples, 1.0).items()}
    return {i: x.tolist() for i, x in scored.items()}


@pytest.mark.parametrize("case", RESHARDED)
def test_a_checkpoint_of_one_layout_loads_under_another(tmp_path, case):
    family, head, (saved_on, saved_under), (loaded_on, loaded_under) = RESHARDED[case]
    model = write_hf_model(tmp_path / "model", family, tied=family == "qwen2", vocab_size=101)
    folder = tmp_path / "checkpoint"
    saved = run_ranks(scores_after, saved_on, model, head, saved_under, folder, True, **saved_under)
    loaded = run_ranks(scores_after, loaded_on, model, head, loaded_under, folder, False, **loaded_under)
    before, after = ({i: x for rank in ranks for i, x in rank.items()} for ranks in (saved, loaded))
    assert before.keys() == after.keys() == set(range(len(SEQUENCES)))
    for i in before:
        torch.testing.assert_close(torch.tensor(after[i]), torch.tensor(before[i]), atol=2e-5, rtol=0)
