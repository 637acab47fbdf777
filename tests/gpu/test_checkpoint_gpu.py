"""Checkpoints on GPUs, with transformer-engine's layers and fused Adam: training goes on from them bit for bit.

About four minutes on two GPUs; `pytest -m gpu tests/gpu` on a machine with at least one.
"""

from pathlib import Path

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig, RoleConfig
from megarl.rollout.server import free_port
from megarl.sample import Prompt, Sample

pytestmark = pytest.mark.gpu
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZE = HEADS | {"hidden_size": 256, "intermediate_size": 256}
MODELS = {  # family, tied, overrides
    "qwen2": ("qwen2", True, {}),
    "qwen3-moe": ("qwen3_moe", False, {"moe_intermediate_size": 128, "num_experts": 16}),
}
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
CASES = {  # number of ranks -> name -> model, groups, offload
    1: {
        "one GPU": ("qwen2", {}, "none"),
        "offloaded": ("qwen2", {}, "all"),
        "experts": ("qwen3-moe", {}, "none"),
    },
    2: {
        "DP 2": ("qwen2", {}, "none"),
        "TP 2 SP": ("qwen2", TP_SP, "all"),
        "tied, PP 2": ("qwen2", {"pipeline_parallel": 2}, "none"),
        "experts, EP 2": ("qwen3-moe", {"expert_parallel": 2}, "none"),
    },
}
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 40, [4, 2]]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
BEFORE, ALL = 3, 6  # steps


def for_each_case(rank, work, world_size, ports, models, folder) -> dict:
    """name -> what `work` returns; one process serves all cases, for it takes half a minute to start."""
    from megarl.engine import parallel

    results = {}
    for (name, (model, groups, offload)), port in zip(CASES[world_size].items(), ports, strict=True):
        parallel.shutdown()
        parallel.initialize(rank, world_size, "127.0.0.1", port, RoleConfig(**groups), seed=1, timeout_s=60)
        results[name] = work(models[model], folder / name, groups | {"offload": offload})
    return results


def make(model, role):
    engine = make_engine(model, "bfloat16", max_tokens=160, transformer_impl="transformer_engine", **role)
    engine.use_optimizer(OptimizerConfig())
    return engine


def train(engine, steps) -> list[float]:
    """Gradient norms; with turns of the engine on the device where it is offloaded."""
    norms = []
    for step in steps:
        engine.place("generate")
        engine.place("update")
        norms.append(engine.train_step(SAMPLES[step % 2 :], sft_loss, learning_rate=1e-3 / (step + 1))["grad_norm"])
        if step % 2:
            engine.capture_reference(0.9)
    return norms


def train_straight(model, folder, role) -> list[float]:
    """All steps, the state in the middle being written meanwhile, and a save; and once more without a save between."""
    from megarl.engine import checkpoint, parallel

    contents = checkpoint.Contents(optimizer=True, reference=True)
    engine = make(model, role)
    engine.capture_reference(0.9)
    train(engine, range(BEFORE))
    if parallel.is_rank_zero():
        (folder / "middle").mkdir(parents=True)
    parallel.barrier()
    writer = checkpoint.Writer(engine, model)
    writer.start(folder / "middle", contents)
    norms = train(engine, range(BEFORE, ALL))
    writer.finish()
    checkpoint.save(engine, model, folder / "straight", contents)
    control = make(model, role)
    control.capture_reference(0.9)
    train(control, range(ALL))
    checkpoint.save(control, model, folder / "control", contents)
    return norms


def train_resumed(model, folder, role) -> list[float]:
    """What was loaded is saved at once, and once more after the other steps."""
    from megarl.engine import checkpoint

    contents = checkpoint.Contents(optimizer=True, reference=True)
    engine = make(model, role)
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.fill_(0.5)
    assert checkpoint.load(engine, folder / "middle", contents)
    checkpoint.save(engine, model, folder / "loaded", contents)
    norms = train(engine, range(BEFORE, ALL))
    checkpoint.save(engine, model, folder / "resumed", contents)
    return norms


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint, put together."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {key: about for key, about in found.items() if isinstance(about, TensorStorageMetadata)}
    tensors = {key: torch.empty(about.size, dtype=about.properties.dtype) for key, about in stored.items()}
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("world_size", CASES)
def test_training_goes_on_from_a_save_bit_for_bit(tmp_path, monkeypatch, world_size):
    if world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # transformer-engine's attention
    models = {}
    for name, (family, tied, overrides) in MODELS.items():
        models[name] = write_hf_model(tmp_path / name, family, tied, vocab_size=101, **SIZE | overrides)
    runs = []
    for work in (train_straight, train_resumed):
        ports = [free_port("127.0.0.1") for _ in CASES[world_size]]
        runs.append(run_ranks(for_each_case, world_size, work, world_size, ports, models, tmp_path, timeout_s=400))
    files = ["megarl.json", *(f"__{rank}_0.distcp" for rank in range(world_size))]
    for name, (model, _, _) in CASES[world_size].items():
        folder = tmp_path / name

        def differing(one, other):
            return [x for x in files if (folder / one / x).read_bytes() != (folder / other / x).read_bytes()]

        tensors = {run: stored_tensors(folder / run) for run in ("straight", "control")}
        kinds = {key.split(".")[1] for key in tensors["straight"] if key.startswith("optimizer.")}
        assert kinds == {"master", "exp_avg", "exp_avg_sq"}, name
        assert not differing("middle", "loaded"), name
        unlike = [key for key, x in tensors["straight"].items() if not torch.equal(x, tensors["control"][key])]
        print(f"\n{name}: {len(tensors['straight'])} tensors, of which a second training gives {len(unlike)} otherwise")
        norms = [[rank[name] for rank in run] for run in runs]
        if "moe" in model:  # the kernels that exchange tokens are tuned anew in every process
            assert norms[0] == [pytest.approx(of_rank, rel=0.05) for of_rank in norms[1]], name
            continue
        assert not unlike, f"{name}: the training itself does not repeat: {unlike}"
        assert not differing("straight", "resumed"), name
        assert norms[0] == norms[1], name
