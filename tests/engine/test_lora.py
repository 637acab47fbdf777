"""LoRA against adapters put by hand into transformers' model: log-probs, gradients, merged weights, by layout."""

import json

import pytest
import torch
from hf_models import write_hf_model
from lora_adapters import (
    LORA,
    AdaptedModel,
    adapted_model,
    adapter_gradients,
    adapter_parameters,
    fill,
    hf_logprobs,
    whole_adapters,
)
from ranks import make_engine, run_ranks
from safetensors.torch import load_file

from megarl.algorithms.losses import sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.config_lora import ATTENTION, MATRICES
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
VPP = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
SEQUENCES = [[5, 6, 7, 8, 9, 3, 90], list(range(100, 60, -1)), [1, 100] * 9, [4, 2]]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]
MODELS = {  # family, tied, what has adapters
    "qwen2": ("qwen2", True, MATRICES),
    "llama": ("llama", False, MATRICES),
    "qwen3-moe": ("qwen3_moe", False, ATTENTION),
}
CASES = {  # model, number of ranks, RoleConfig
    "one rank, full recompute": ("qwen2", 1, {"recompute": "full"}),
    "DP 2 TP 2": ("qwen2", 4, {"tensor_parallel": 2}),
    "TP 2 SP, selective recompute": ("llama", 2, TP_SP | {"recompute": "selective"}),
    "PP 2 VPP 2": ("qwen2", 2, VPP),
    "experts, TP 2 SP EP 2": ("qwen3-moe", 2, TP_SP | {"expert_parallel": 2}),
}
SOAK_CASES = {
    "DP 2 without overlap": ("llama", 2, {"overlap_grad_reduce": False}),
    "TP 2": ("llama", 2, {"tensor_parallel": 2}),
    "TP 2 SP PP 2": ("qwen2", 4, TP_SP | {"pipeline_parallel": 2}),
    "TP 2 SP PP 2, full recompute": ("qwen2", 4, TP_SP | {"pipeline_parallel": 2, "recompute": "full"}),
    "experts, DP 2": ("qwen3-moe", 2, {}),
    "experts, PP 2 DP 2 EP 2": ("qwen3-moe", 4, {"pipeline_parallel": 2, "expert_parallel": 2}),
}


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def get(name) -> AdaptedModel:
        if name not in made:
            family, tied, matrices = MODELS[name]
            folder = write_hf_model(tmp_path_factory.mktemp(name), family, tied, VOCAB_SIZE)
            made[name] = adapted_model(folder, matrices, SEQUENCES)
        return made[name]

    return get


def copies(engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in engine.parameters()]


def scores(engine, reference=False) -> dict[int, list[float]]:
    return {i: values.tolist() for i, (values, _) in engine.logprobs(SAMPLES, 1.0, reference).items()}


def adapt_and_step(rank, folder, adapters, role):
    """({sample: log-probs} at the start and with `adapters`, merged weights, the result of a step, gradients of the
    adapters, numbers in all adapters and in all moments)."""
    engine = make_engine(folder, max_tokens=40, lora=LORA, **role)
    start = scores(engine)
    fill(engine, adapters)
    adapted = scores(engine)
    weights = {name: tensor.numpy() for name, tensor in engine.hf_tensors() if tensor.numel()}
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    engine.train_step(SAMPLES, sft_loss, learning_rate=0.0)  # only from the second step on is the reduction overlapped
    before = copies(engine)
    result = engine.train_step(SAMPLES, sft_loss, learning_rate=1e-3)
    parameters = [item for chunk in engine.chunks for item in chunk.named_parameters()]
    trained = {name for name, parameter in parameters if hasattr(parameter, "main_grad")}
    changed = {name for (name, parameter), old in zip(parameters, before) if not torch.equal(parameter, old)}
    assert trained == changed == {name for name, _ in parameters if "lora_" in name}
    num_adapted = sum(parameter.numel() for name, parameter in parameters if "lora_" in name)
    num_moments = sum(state.numel() for state in engine._optimizer_tensors() if state.dim())
    return start, adapted, weights, result, adapter_gradients(engine), (num_adapted, num_moments)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in SOAK_CASES)])
def test_logprobs_gradients_and_merged_weights_equal_adapters_put_into_transformers(references, case):
    model, world_size, role = (CASES | SOAK_CASES)[case]
    data_parallel = world_size // (role.get("tensor_parallel", 1) * role.get("pipeline_parallel", 1))
    reference = references(model)
    results = run_ranks(adapt_and_step, world_size, reference.folder, reference.adapters, role, **role)
    start, adapted, weights, gradients = (
        {name: x for result in results for name, x in result[which].items()} for which in (0, 1, 2, 4)
    )
    for i in range(len(SEQUENCES)):
        torch.testing.assert_close(torch.tensor(start[i][1:]), reference.start[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(adapted[i][1:]), reference.logprobs[i], atol=1e-5, rtol=0)
        assert (reference.start[i] - reference.logprobs[i]).abs().max() > 0.01
    assert weights.keys() == reference.weights.keys()
    for name, weight in reference.weights.items():
        torch.testing.assert_close(torch.tensor(weights[name]), weight, atol=1e-6, rtol=0, msg=name)
    assert sum(result[3].get("loss", 0.0) for result in results) == pytest.approx(reference.loss, rel=1e-5)
    assert gradients.keys() == reference.gradients.keys()
    for name, gradient in reference.gradients.items():
        assert gradient.abs().max() > 1e-5, name
        torch.testing.assert_close(torch.tensor(gradients[name]), gradient, atol=1e-6, rtol=1e-4, msg=name)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in reference.gradients.values())).item()
    assert all(result[3]["grad_norm"] == pytest.approx(norm, rel=1e-5) for result in results)
    num_adapted, num_moments = (sum(result[5][which] for result in results) for which in (0, 1))
    assert num_moments * data_parallel == 2 * num_adapted > 0  # a replica's ranks share them


def initial_adapters(rank, folder, role):
    engine = make_engine(folder, lora=LORA, **role)
    return {name: matrix.detach().numpy() for name, matrix in whole_adapters(engine, lambda parameter: parameter)}


def test_adapters_start_alike_under_every_layout(references):
    reference, role = references("qwen2"), TP_SP | {"pipeline_parallel": 2}
    (whole,) = run_ranks(initial_adapters, 1, reference.folder, {})
    ranks = run_ranks(initial_adapters, 4, reference.folder, role, **role)
    split = {name: matrix for rank in ranks for name, matrix in rank.items()}
    assert whole.keys() == split.keys() == reference.adapters.keys()
    for name, matrix in whole.items():
        assert (matrix == split[name]).all()
        bound = matrix.shape[1] ** -0.5
        assert not matrix.any() if name.endswith(".b") else 0.9 * bound < abs(matrix).max() <= bound
    drawn = [matrix.tobytes() for name, matrix in whole.items() if name.endswith(".a")]
    assert len(set(drawn)) == len(drawn) == 4 * len(MATRICES)


def train_a_critic(rank, folder, offload):
    """(Weights after three steps in bfloat16, names of HF tensors that they changed, values)."""
    from megarl.engine.engine import Engine

    role = CriticConfig(lora=LORA, value_head_std=0.3, offload=offload, max_tokens_per_gpu=40, **TP_SP)
    engine = Engine(ModelConfig(path=str(folder), dtype="bfloat16"), role, "value")
    engine.use_optimizer(OptimizerConfig())
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    for _ in range(3):
        engine.place("update")
        engine.train_step(SAMPLES, sft_loss, 1e-2)
        engine.place("generate")
        is_held = {weight.untyped_storage().nbytes() > 0 for weight in engine.parameters()}
        assert is_held == {offload == "none"}
        engine.place("score")
    changed = {name for name, tensor in engine.hf_tensors() if not torch.equal(tensor, before[name])}
    return [weight.float().numpy() for weight in copies(engine)], changed, list(engine.values(SAMPLES).values())


def test_a_critic_trains_its_head_beside_adapters_and_moves_to_host_memory(references):
    folder = references("llama").folder
    stay, moved = (run_ranks(train_a_critic, 2, folder, offload, **TP_SP) for offload in ("none", "all"))
    for (weights, changed, values), (moved_weights, moved_changed, moved_values) in zip(stay, moved):
        assert all((x == y).all() for x, y in zip(weights, moved_weights, strict=True))
        assert changed == moved_changed and all(torch.equal(x, y) for x, y in zip(values, moved_values, strict=True))
    projections = {name for names in MATRICES.values() for name in names}
    assert {name.split(".")[-2] for name in stay[0][1]} == projections | {"score"} and len(stay[0][1]) == 4 * 7 + 2


def save_and_go_on(rank, model, adapters, folder, role):
    """Log-probs at a save, those of the reference, and those after one more step."""
    from megarl.engine import checkpoint

    engine = make_engine(model, lora=LORA, **role)
    engine.capture_reference()
    fill(engine, adapters)
    engine.use_optimizer(OptimizerConfig())
    engine.train_step(SAMPLES, sft_loss, 1e-2)
    checkpoint.save(engine, model, folder, checkpoint.Contents(optimizer=True, reference=True))
    saved, reference = scores(engine), scores(engine, reference=True)
    assert {id(parameter) for parameter, _ in engine.reference_tensors()} == {
        id(parameter) for _, parameter, _ in adapter_parameters(engine)
    }
    engine.train_step(SAMPLES, sft_loss, 1e-2)
    return saved, reference, scores(engine)


def load_and_go_on(rank, model, folder, role):
    """The same of an engine that loads."""
    from megarl.engine import checkpoint

    engine = make_engine(model, lora=LORA, **role)
    engine.use_optimizer(OptimizerConfig())
    checkpoint.load(engine, folder, checkpoint.Contents(optimizer=True, reference=True))
    saved, reference = scores(engine), scores(engine, reference=True)
    engine.train_step(SAMPLES, sft_loss, 1e-2)
    return saved, reference, scores(engine)


@pytest.fixture(scope="module")
def saved(references, tmp_path_factory):
    """(role folder, log-probs at the save, of the reference, after one more step)."""
    model, role = references("qwen2"), TP_SP | {"pipeline_parallel": 2}
    folder = tmp_path_factory.mktemp("run") / "actor"
    return folder, *joined(run_ranks(save_and_go_on, 4, model.folder, model.adapters, folder, role, **role))


def joined(results) -> list[dict[int, torch.Tensor]]:
    return [{i: torch.tensor(x) for rank in ranks for i, x in rank.items()} for ranks in zip(*results)]


@pytest.mark.parametrize("world_size, role", [(2, VPP), (2, {})], ids=["PP 2 VPP 2", "DP 2"])
def test_adapters_their_optimizer_and_reference_load_under_another_layout(references, saved, world_size, role):
    folder, *expected = saved
    model = references("qwen2")
    loaded = run_ranks(load_and_go_on, world_size, model.folder, folder, role, **role)
    for before, after in zip(expected, joined(loaded), strict=True):
        assert before.keys() == after.keys() == set(range(len(SEQUENCES)))
        for i in before:
            torch.testing.assert_close(after[i], before[i], atol=2e-5, rtol=0)
    saved_at, reference, later = expected
    for i in reference:
        assert (later[i] - saved_at[i]).abs().max() > 1e-3
        torch.testing.assert_close(reference[i][1:], model.start[i], atol=1e-5, rtol=0)


def export_peft(folder, model, out, head: str):
    """Write the adapter folder `out` of a role folder; (stored tensors, the model's shape, adapters by place)."""
    from megarl.engine.hf.layout import stored_weights
    from megarl.engine.hf.peft import stored_adapters, write_peft
    from megarl.engine.hf.shape import ModelShape
    from megarl.engine.hf.streaming import StoredTensors

    shape, stored = ModelShape.read(model), StoredTensors(folder)
    listed = stored_adapters(shape, LORA)
    assert all(weight.fits(stored.sizes[weight.key]) for weight in listed)
    adapters = {weight.parameter: stored.read(weight.key, weight.index) for weight in listed}
    weights = [weight for weight in stored_weights(shape, head) if weight.parameter.line == "value_head.weight"]
    write_peft(out, str(model), LORA, shape, adapters, {"score.weight": stored.read(w.key, w.index) for w in weights})
    return stored, shape, adapters


def with_adapter_folder(model, folder):
    """A model of transformers as PEFT would have it with the adapters in `folder`, all of which are used."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scale = settings["lora_alpha"] / settings["r"]
    for name, module in model.named_modules():
        last, prefix = name.rpartition(".")[2], f"base_model.model.{name}"
        if last in settings["target_modules"]:
            a, b = (tensors.pop(f"{prefix}.lora_{which}.weight") for which in "AB")
            module.register_forward_hook(lambda _, x, output, a=a, b=b: output + scale * (x[0] @ a.T @ b.T))
        elif last in (settings["modules_to_save"] or []):
            module.load_state_dict({"weight": tensors.pop(f"{prefix}.weight")})
    assert not tensors and settings["peft_type"] == "LORA"
    return model, settings


def test_peft_and_merged_exports_give_the_engine_s_logprobs_in_transformers(references, saved, tmp_path):
    from transformers import AutoModelForCausalLM

    from megarl.engine.hf.layout import stored_weights
    from megarl.engine.hf.mapping import from_shards
    from megarl.engine.hf.peft import merge

    folder, expected, *_ = saved
    model = references("qwen2").folder
    stored, shape, adapters = export_peft(folder, model, tmp_path, "lm")
    adapted, settings = with_adapter_folder(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path)
    assert (settings["task_type"], settings["base_model_name_or_path"]) == ("CAUSAL_LM", str(model))

    weights = {}
    for weight in stored_weights(shape, "lm"):
        whole = stored.read(weight.key, weight.index)
        matrices = [matrix for key, matrix in adapters.items() if key.adapted == weight.parameter]  # A, B
        parts = from_shards(shape, weight.parameter, [merge(whole, *matrices, LORA.scale) if matrices else whole])
        weights |= zip(weight.parameter.hf_names(shape), parts, strict=True)
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    missing, unexpected = merged.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected  # tied
    for i, ids in enumerate(SEQUENCES):
        for exported in (adapted, merged):
            torch.testing.assert_close(hf_logprobs(exported, ids).detach(), expected[i][1:], atol=1e-5, rtol=0)


def save_a_critic(rank, model, adapters, folder):
    """The value after all but the last token of each sequence."""
    from megarl.engine import checkpoint
    from megarl.engine.engine import Engine

    role = CriticConfig(lora=LORA, value_head_std=0.3, value_head_bias=False)
    engine = Engine(ModelConfig(path=str(model), dtype="float32"), role, "value")
    fill(engine, adapters)
    checkpoint.save(engine, model, folder)
    return [values[-1].item() for _, values in sorted(engine.values(SAMPLES).items())]


def test_a_critic_s_peft_export_gives_its_values_in_transformers(references, tmp_path):
    from transformers import AutoModelForSequenceClassification

    reference, folder = references("llama"), tmp_path / "critic"
    (values,) = run_ranks(save_a_critic, 1, reference.folder, reference.adapters, folder)
    export_peft(folder, reference.folder, tmp_path, "value")
    model = AutoModelForSequenceClassification.from_pretrained(reference.folder, num_labels=1, dtype=torch.float32)
    model, settings = with_adapter_folder(model, tmp_path)
    assert settings["task_type"] == "SEQ_CLS"
    scores = [model(torch.tensor([ids[:-1]])).logits.item() for ids in SEQUENCES]
    assert scores == pytest.approx(values, abs=1e-5) and max(map(abs, scores)) > 0.1
