"""Checkpoints of an Engine: training goes on from them bit for bit, and under any other layout."""

import json
import random
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.algorithms.losses import sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 9, [4, 2, 17]]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
EVERYTHING = {"optimizer": True, "reference": True}
HOST = {"host_optimizer": True}
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
TP4, PP2, EP2 = {"tensor_parallel": 4}, {"pipeline_parallel": 2}, {"expert_parallel": 2}
VPP2 = PP2 | {"virtual_pipeline_parallel": 2}


def write_model(folder, family, tied, num_layers=2):
    experts = {"num_experts": 16} if family == "qwen3_moe" else {}
    return write_hf_model(folder, family, tied, VOCAB_SIZE, num_layers, **experts)


def broken_loss(logprobs_T, batch):
    return logprobs_T.sum() * float("nan"), {}


def make(model, head, dtype, role):
    from megarl.engine.engine import Engine

    settings = CriticConfig(value_head_std=0.3, max_tokens_per_gpu=50, **role)
    engine = Engine(ModelConfig(path=str(model), dtype=dtype), settings, head)
    engine.use_optimizer(OptimizerConfig())
    return engine


def spoil(engine):
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(0.5)


def scores(engine):
    if engine.head == "value":
        return {i: x.tolist() for i, x in engine.values(SAMPLES).items()}
    return {i: x[0].tolist() for i, x in engine.logprobs(SAMPLES, 1.0).items()}


def random_numbers() -> list[float]:
    """One of each generator."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = torch.rand(1).item()
    return [random.random(), np.random.rand(), torch.rand(1).item(), forked]


def train(engine, steps, ema_decay) -> list[str]:
    """What the steps of these numbers report, each of its own data and learning rate, and random numbers after each.
    The update of step 1 is skipped."""
    reports = []
    for step in steps:
        loss = broken_loss if step == 1 else sft_loss
        result = engine.train_step(SAMPLES[step % 3 :], loss, learning_rate=1e-3 / (step + 1))
        assert result["skipped"] == (step == 1)
        if step % 2:
            engine.capture_reference(ema_decay)
        reports.append(f"{result} {random_numbers()}")
    return reports


def train_straight(rank, model, folder, head, dtype, role, at, ema_decay):
    """Three steps more than `at`, during which the state after `at` is written, and a save after them."""
    from megarl.engine.checkpoint import Contents, Writer

    engine = make(model, head, dtype, role)
    engine.capture_reference(ema_decay)
    train(engine, range(at), ema_decay)
    writer = Writer(engine, model)
    for name in ("middle", "straight"):
        (folder / name).mkdir(exist_ok=True)
    trained_on = threading.Event()
    writer._pool.submit(trained_on.wait, 60)  # what writes comes after it
    writer.start(folder / "middle", Contents(**EVERYTHING))
    reports = train(engine, range(at, at + 3), ema_decay)
    with pytest.raises(AssertionError, match="the last save was not finished"):
        writer.start(folder / "straight", Contents(**EVERYTHING))
    assert not writer.is_written()
    trained_on.set()
    writer.finish()
    writer.start(folder / "straight", Contents(**EVERYTHING))
    assert writer.finish()
    return reports


def train_resumed(rank, model, folder, head, dtype, role, at, ema_decay):
    """The same steps after a load, and a save after them."""
    from megarl.engine import checkpoint

    engine = make(model, head, dtype, role)
    spoil(engine)
    assert checkpoint.load(engine, folder / "middle", checkpoint.Contents(**EVERYTHING))
    reports = train(engine, range(at, at + 3), ema_decay)
    checkpoint.save(engine, model, folder / "resumed", checkpoint.Contents(**EVERYTHING))
    return reports


EXACT = {  # family, tied, head, dtype, steps before the save, EMA of the reference, number of ranks, RoleConfig
    "one rank, after a skipped step": ("qwen2", True, "lm", "bfloat16", 2, 0.9, 1, {}),
    "before the first step": ("llama", False, "lm", "float32", 0, None, 1, {}),
    "DP 2": ("qwen2", True, "lm", "bfloat16", 3, 0.9, 2, {}),
    "optimizer in host memory": ("qwen2", True, "lm", "bfloat16", 3, 0.9, 2, HOST),
    "TP 2": ("qwen3", False, "lm", "bfloat16", 3, None, 2, TP_SP),
    "tied, PP 2": ("qwen2", True, "lm", "float32", 3, 0.9, 2, PP2),
    "critic": ("llama", False, "value", "float32", 3, None, 1, {}),
    "experts, EP 2": ("qwen3_moe", False, "lm", "float32", 3, 0.9, 2, EP2),
}


@pytest.mark.parametrize("case", EXACT)
def test_training_goes_on_from_a_save_bit_for_bit(tmp_path, case):
    family, tied, head, dtype, at, ema_decay, world_size, role = EXACT[case]
    model = write_model(tmp_path / "model", family, tied)
    arguments = (model, tmp_path, head, dtype, role, at, ema_decay)
    straight = run_ranks(train_straight, world_size, *arguments, **role)
    resumed = run_ranks(train_resumed, world_size, *arguments, **role)
    assert straight == resumed
    names = ["megarl.json", *(f"__{rank}_0.distcp" for rank in range(world_size))]
    for name in names:
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name
    about = json.loads((tmp_path / "straight" / "megarl.json").read_text())
    assert about["optimizer_steps"] == at + 2
    assert about["reference"] == ("float32" if ema_decay else dtype)


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, put together, without the vocabulary's padding."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {key: about for key, about in found.items() if isinstance(about, TensorStorageMetadata)}
    tensors = {key: torch.empty(about.size, dtype=about.properties.dtype) for key, about in stored.items()}
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    is_padded = re.compile(r".*(word_embeddings|output_layer)\.weight")
    return {key: x[:VOCAB_SIZE] if is_padded.fullmatch(key) else x for key, x in tensors.items()}


def train_and_save(rank, model, folder, head, dtype, role):
    """(Log-probs or values at a save, the loss of the next step, and of the one after it)."""
    from megarl.engine import checkpoint

    engine = make(model, head, dtype, role)
    engine.capture_reference(0.9)
    for step in range(3):
        engine.train_step(SAMPLES, sft_loss, 1e-3)
    engine.capture_reference(0.9)
    checkpoint.save(engine, model, folder, checkpoint.Contents(**EVERYTHING))
    return scores(engine), [engine.train_step(SAMPLES, sft_loss, 1e-3).get("loss", 0.0) for _ in range(2)]


def load_and_save(rank, model, folder, head, dtype, role):
    """The same after a load; a save of what was loaded comes first."""
    from megarl.engine import checkpoint

    engine = make(model, head, dtype, role)
    spoil(engine)
    assert not checkpoint.load(engine, folder, checkpoint.Contents(**EVERYTHING))
    checkpoint.save(engine, model, folder.with_name("again"), checkpoint.Contents(**EVERYTHING))
    return scores(engine), [engine.train_step(SAMPLES, sft_loss, 1e-3).get("loss", 0.0) for _ in range(2)]


RESHARDED = {  # family, tied, head, dtype, saved under, loaded under: number of ranks, RoleConfig
    "TP 2 to one rank": ("qwen2", True, "lm", "bfloat16", (2, TP_SP), (1, {})),
    "one rank to DP 2, the optimizer in host memory": ("llama", False, "lm", "bfloat16", (1, {}), (2, HOST)),
    "DP 2 to TP 2 PP 2": ("qwen2", True, "lm", "float32", (2, {}), (4, TP_SP | PP2)),
    "VPP 2 to DP 3": ("llama", False, "lm", "float32", (2, VPP2), (3, {})),
    "one rank to TP 4, a vocabulary padded further": ("qwen3", False, "lm", "float32", (1, {}), (4, TP4)),
    "TP 4 to VPP 2, a vocabulary padded less": ("qwen2", True, "lm", "float32", (4, TP4), (2, VPP2)),
    "experts, EP 2 to PP 2": ("qwen3_moe", False, "lm", "float32", (2, EP2), (2, PP2)),
    "experts, VPP 2 to EP 2 TP 2": ("qwen3_moe", True, "lm", "float32", (2, VPP2), (2, TP_SP | EP2)),
    "value head": ("qwen2", True, "value", "float32", (2, TP_SP), (2, PP2)),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.soak) if "TP 4" in c else c for c in RESHARDED])
def test_training_goes_on_under_another_layout(tmp_path, case):
    family, tied, head, dtype, (saved_on, saved_under), (loaded_on, loaded_under) = RESHARDED[case]
    model = write_model(tmp_path / "model", family, tied, num_layers=4)
    arguments = (model, tmp_path / "saved", head, dtype)
    saved = run_ranks(train_and_save, saved_on, *arguments, saved_under, **saved_under)
    loaded = run_ranks(load_and_save, loaded_on, *arguments, loaded_under, **loaded_under)
    expected, found = stored_tensors(tmp_path / "saved"), stored_tensors(tmp_path / "again")
    assert expected.keys() == found.keys()
    kinds = {key.split(".")[1] if key.startswith("optimizer.") else key.split(".")[0] for key in expected}
    assert kinds >= {"exp_avg", "exp_avg_sq", "reference", "decoder"} and ("master" in kinds) == (dtype == "bfloat16")
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    for name in ("saved", "again"):
        assert json.loads((tmp_path / name / "megarl.json").read_text())["optimizer_steps"] == 3
    (before, losses), (after, losses_after) = (
        ({i: x for rank in ranks for i, x in rank[0].items()}, torch.tensor([rank[1] for rank in ranks]).sum(0))
        for ranks in (saved, loaded)
    )
    assert before.keys() == after.keys() == set(range(len(SAMPLES)))
    for i, expected_scores in before.items():
        assert after[i] == pytest.approx(expected_scores, abs=3e-6 if dtype == "float32" else 0.1)
    assert losses_after.tolist() == pytest.approx(losses.tolist(), rel=1e-6 if dtype == "float32" else 1e-2)


def save_and_load_offloaded(rank, model, folder):
    from megarl.engine import checkpoint

    contents = checkpoint.Contents(optimizer=True)
    for offload in ("none", "optimizer", "all"):
        engine = make(model, "lm", "bfloat16", {"offload": offload})
        engine.train_step(SAMPLES, sft_loss, 1e-3)
        engine.place("generate")
        if offload != "none":
            for phase in ("generate", "score"):
                engine.place(phase)
                with pytest.raises(AssertionError, match=r"place\('update'\) comes first"):
                    checkpoint.Writer(engine, model).start(folder / offload, contents)
        engine.place("update")
        checkpoint.save(engine, model, folder / offload, contents)
        again = make(model, "lm", "bfloat16", {"offload": offload})
        checkpoint.load(again, folder / offload, contents)
        again.place("generate")
        again.place("update")
        checkpoint.save(again, model, folder / f"{offload} again", contents)


def test_what_is_offloaded_is_back_on_the_device_for_a_save_and_the_same_is_saved(tmp_path):
    run_ranks(save_and_load_offloaded, 1, write_model(tmp_path / "model", "qwen2", True), tmp_path)
    files = [file.read_bytes() for file in tmp_path.glob("*/__0_0.distcp")]
    assert len(files) == 6 and len(set(files)) == 1


def names_on_disk(rank, model):
    """The keys of a checkpoint."""
    from megarl.engine import checkpoint

    return sorted({tensor.key for tensor in checkpoint._weights(make_engine(model))["chunk_0"].values()})


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
    not, then again. The second rank has nothing to write."""
    from megarl.engine import checkpoint
    from megarl.engine.modules import RMSNorm

    scored = []
    for step, has_extra_state in enumerate([True, False, True]):
        if has_extra_state:
            RMSNorm.get_extra_state, RMSNorm.set_extra_state = (lambda self: torch.empty(0)), (lambda self, state: None)
        else:
            del RMSNorm.get_extra_state, RMSNorm.set_extra_state
        engine = make_engine(model)
        assert ("decoder.final_layernorm._extra_state" in engine.chunks[0].state_dict()) == has_extra_state
        if step:
            spoil(engine)
            checkpoint.load(engine, Path(folder, str(step - 1)))
        checkpoint.save(engine, model, Path(folder, str(step)))
        scored.append(scores(engine))
    return scored


def test_layers_with_and_without_extra_state_read_each_others_checkpoints(tmp_path):
    model = write_model(tmp_path / "model", "qwen3_moe", False)
    results = run_ranks(exchange_with_extra_state, 2, model, tmp_path)
    for first, second, third in results:
        assert first == second == third
    assert sum(len(first) for first, _, _ in results) == len(SAMPLES)
    assert [file.name for file in (tmp_path / "2").glob("*.distcp")] == ["__0_0.distcp"]


def save_in_several_files(rank, model, folder):
    """(Names of the rank's files, whether a load gives the same log-probs.)"""
    from megarl.engine import checkpoint

    checkpoint.FILE_BYTES = 100_000
    engine, again = make_engine(model), make_engine(model)
    spoil(again)
    checkpoint.save(engine, model, folder)
    checkpoint.load(again, folder)
    return sorted(file.name for file in Path(folder).glob("*.distcp")), scores(engine) == scores(again)


def test_a_large_part_is_written_into_several_files_at_the_same_time(tmp_path):
    model = write_model(tmp_path / "model", "qwen2", False)
    ((files, is_same),) = run_ranks(save_in_several_files, 1, model, tmp_path / "checkpoint")
    assert is_same and 1 < len(files) <= 8 and files[0] == "__0_0.distcp"
