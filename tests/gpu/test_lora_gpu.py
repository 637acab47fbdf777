"""LoRA on GPUs, in transformer-engine's layers too; `pytest -m gpu tests/gpu` on a machine with at least one GPU."""

from pathlib import Path

import pytest
import torch
from hf_models import write_hf_model
from lora_adapters import LORA, adapted_model, adapter_gradients, fill
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.config_lora import ATTENTION, MATRICES
from megarl.sample import Prompt, Sample

pytestmark = pytest.mark.gpu
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZE = HEADS | {"hidden_size": 256, "intermediate_size": 256}
MODELS = {  # family, tied, overrides, what has adapters
    "qwen2": ("qwen2", True, {}, MATRICES),
    "qwen3-moe": ("qwen3_moe", False, {"moe_intermediate_size": 128}, ATTENTION),
}
ENGINES = {  # model, layers of, dtype, recompute
    "local": ("qwen2", "local", "float32", "none"),
    "te": ("qwen2", "transformer_engine", "bfloat16", "none"),
    "te, full recompute": ("qwen2", "transformer_engine", "bfloat16", "full"),
    "te, selective recompute": ("qwen2", "transformer_engine", "bfloat16", "selective"),
    "te, experts": ("qwen3-moe", "transformer_engine", "bfloat16", "none"),
}
LOCAL, *TE, EXPERTS = ENGINES
GROUPS = {  # number of ranks, RoleConfig, engines
    "one GPU": (1, {}, [LOCAL, *TE, EXPERTS]),
    "TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}, [LOCAL, *TE, EXPERTS]),
    "TP 2": (2, {"tensor_parallel": 2}, [LOCAL, *TE]),
    "PP 2 VPP 2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, [LOCAL, *TE]),
    "CP 2": (2, {"context_parallel": 2}, TE),
}
# Absolute, of log-probs; relative, of the gradient's norm; relative in norm, of each gradient; absolute, of weights.
TOLERANCE = {"float32": (3e-4, 1e-4, 1e-3, 1e-6), "bfloat16": (0.15, 0.02, 0.1, 4e-3)}
ROUTED = (0.3, 0.1, 0.7, 4e-3)  # rounded to bfloat16, two experts of a token change places now and then
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 40, [4, 2]]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}
    for name, (family, tied, overrides, matrices) in MODELS.items():
        folder = write_hf_model(tmp_path_factory.mktemp(name), family, tied, vocab_size=101, **SIZE | overrides)
        made[name] = adapted_model(folder, matrices, SEQUENCES, std=0.1)
    return made


def adapt_and_step_each(rank, models, names, role, place):
    """Of each engine: log-probs with adapters, merged weights, the results of three steps, gradients of the adapters
    after the first of them, log-probs of the reference."""
    return {name: adapt_and_step(*models[ENGINES[name][0]], *ENGINES[name], role, place) for name in names}


def adapt_and_step(folder, adapters, model, impl, dtype, recompute, role, place):
    settings = role | {"lora": LORA, "recompute": recompute, "offload": "all"}
    engine = make_engine(folder, dtype, max_tokens=160, transformer_impl=impl, **settings)
    fill(engine, adapters)
    logprobs = {i: x.tolist() for i, (x, _) in engine.logprobs(SAMPLES, 1.0).items()}
    weights = {name: x.to("cpu", torch.float32, copy=True).numpy() for name, x in engine.hf_tensors() if x.numel()}
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    engine.capture_reference()
    for phase, is_held in (("generate", False), ("update", True)):
        engine.place(phase)
        assert all((weight.untyped_storage().nbytes() > 0) == is_held for weight in engine.parameters())
    engine.train_step(SAMPLES, sft_loss, learning_rate=0.0)  # only from the second step on is the reduction overlapped
    steps = [engine.train_step(SAMPLES, sft_loss, learning_rate=1e-3)]
    gradients = adapter_gradients(engine)
    steps += [engine.train_step(SAMPLES, sft_loss, learning_rate=1e-3) for _ in range(2)]
    for name, parameter in engine.chunks[0].named_parameters():
        assert ("lora_" in name) == hasattr(parameter, "main_grad") == parameter.requires_grad, name
    before = {i: x.tolist() for i, (x, _) in engine.logprobs(SAMPLES, 1.0, reference=True).items()}
    if impl == "transformer_engine" and recompute == "none" and "context_parallel" not in role:
        assert local_layers_read(engine, folder, dtype, settings, Path(place, model))
    return logprobs, weights, steps, gradients, before


def local_layers_read(engine, folder, dtype, settings, place) -> bool:
    """Whether local layers read the checkpoint of these."""
    from megarl.engine import checkpoint

    checkpoint.save(engine, folder, place)
    local = make_engine(folder, dtype, transformer_impl="local", **settings)
    checkpoint.load(local, place)
    tensors, others = dict(engine.hf_tensors()), dict(local.hf_tensors())  # each in its own order
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.mark.parametrize("groups", GROUPS)
def test_logprobs_gradients_and_merged_weights_equal_adapters_put_into_transformers(references, groups, tmp_path):
    world_size, role, names = GROUPS[groups]
    if world_size > torch.cuda.device_count():
        pytest.skip(f"needs {world_size} GPUs")
    models = {model: (reference.folder, reference.adapters) for model, reference in references.items()}
    ranks = run_ranks(adapt_and_step_each, world_size, models, names, role, tmp_path, timeout_s=400, **role)
    for name in names:
        model, _, dtype, _ = ENGINES[name]
        reference, results = references[model], [rank[name] for rank in ranks]
        tolerance, norm_tolerance, gradient_tolerance, rounding = ROUTED if "moe" in model else TOLERANCE[dtype]
        logprobs, weights, gradients, before = (
            {key: x for result in results for key, x in result[which].items()} for which in (0, 1, 3, 4)
        )
        differences = torch.cat([torch.tensor(logprobs[i][1:]) - x for i, x in enumerate(reference.logprobs)]).abs()
        assert differences.mean() < tolerance / 2 and ("moe" in model or differences.max() < tolerance), name
        assert weights.keys() == reference.weights.keys()
        off = {key: float(abs(torch.tensor(weights[key]) - x).max()) for key, x in reference.weights.items()}
        assert max(off.values()) < rounding, (name, off)
        norm = torch.sqrt(sum((gradient**2).sum() for gradient in reference.gradients.values())).item()
        assert gradients.keys() == reference.gradients.keys()
        pairs = {key: (torch.tensor(gradients[key]), x) for key, x in reference.gradients.items()}
        errors = {key: float((x - expected).norm() / expected.norm()) for key, (x, expected) in pairs.items()}
        losses = [sum(result[2][step].get("loss", 0.0) for result in results) for step in range(3)]
        print(f"\n{groups}, {name}: gradient norm {results[0][2][0]['grad_norm']:.5f} for {norm:.5f}, largest relative "
              f"error of a gradient {max(errors.values()):.2e}, log-probs off by {differences.max():.2e}")  # fmt: skip
        assert all(result[2][0]["grad_norm"] == pytest.approx(norm, rel=norm_tolerance) for result in results), name
        assert losses[0] == pytest.approx(reference.loss, rel=norm_tolerance), name
        assert losses[0] > losses[1] > losses[2], name
        assert max(errors.values()) < gradient_tolerance, (name, errors)
        assert before == logprobs, name  # the reference: the adapters as they were
