"""LoRA against adapters put by hand into transformers' model: log-probs, gradients, merged weights, by layout."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gradients import full_gradients
from hf_models import write_hf_model
from ranks import make_engine, run_ranks
from safetensors.torch import load_file

from megarl.algorithms.losses import sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.config_lora import ATTENTION, MATRICES, LoraConfig
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101
LORA = LoraConfig(rank=4, alpha=6.0)
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


def put_adapters(model, matrices) -> dict[str, torch.nn.Parameter]:
    """Hang adapters with values that show every mistake into transformers' linear layers; "LAYER.MATRIX.a" or
    "LAYER.PROJECTION.b" -> its parameter."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.nn.Parameter(0.2 * torch.randn(shape, generator=generator))

    adapters = {}
    for i, layer in enumerate(model.model.layers):
        for matrix in matrices:
            holder = layer.self_attn if matrix in ATTENTION else layer.mlp
            linears = {name: getattr(holder, name) for name in MATRICES[matrix]}
            a = adapters[f"{i}.{matrix}.a"] = drawn(LORA.rank, next(iter(linears.values())).in_features)
            for name, linear in linears.items():
                b = adapters[f"{i}.{name}.b"] = drawn(linear.out_features, LORA.rank)
                linear.register_forward_hook(lambda _, x, output, a=a, b=b: output + 6.0 / 4 * (x[0] @ a.T @ b.T))
    return adapters


def hf_logprobs(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """model -> (folder, adapters, log-probs of the model without and with them, loss with them, merged weights); the
    adapters have the gradients of the loss."""
    from transformers import AutoModelForCausalLM

    made = {}

    def get(name):
        if name not in made:
            family, tied, matrices = MODELS[name]
            folder = write_hf_model(tmp_path_factory.mktemp(name), family, tied, VOCAB_SIZE)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            without = [hf_logprobs(model, ids).detach() for ids in SEQUENCES]
            adapters = put_adapters(model, matrices)
            adapted = [hf_logprobs(model, ids) for ids in SEQUENCES]
            loss = -torch.cat(adapted).mean()
            loss.backward()
            weights = merged(load_file(folder / "model.safetensors"), adapters)
            made[name] = folder, adapters, without, [x.detach() for x in adapted], loss.item(), weights
        return made[name]

    return get


def merged(weights: dict[str, torch.Tensor], adapters) -> dict[str, torch.Tensor]:
    for name in weights:
        if found := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(\w+_proj)\.weight", name):
            layer, projection = found.groups()
            matrix = next(matrix for matrix, projections in MATRICES.items() if projection in projections)
            weights[name] += 1.5 * (adapters[f"{layer}.{projection}.b"] @ adapters[f"{layer}.{matrix}.a"]).detach()
    return weights


def adapter_parameters(engine):
    """(place in the model, parameter, its names among the adapters of `put_adapters`)."""
    from megarl.engine.model import parameters_of

    for chunk in engine.chunks:
        for key, parameter in parameters_of(chunk, engine.shape):
            if key.adapted is not None:
                *_, matrix, kind, _ = key.line.split(".")
                names = [f"{matrix}.a"] if kind == "lora_a" else [f"{name}.b" for name in MATRICES[matrix]]
                yield key, parameter, [f"{key.layer}.{name}" for name in names]


@torch.no_grad()
def fill(engine, adapters: dict[str, torch.Tensor]) -> None:
    from megarl.engine.hf.mapping import to_shard
    from megarl.engine.model import tensor_parallel_place

    for key, parameter, names in adapter_parameters(engine):
        tensors = [adapters[name] for name in names]
        if key.partition_dim >= 0:
            tensors = [to_shard(engine.shape, key.adapted, tensors, *tensor_parallel_place(key))]
        parameter.copy_(torch.cat(tensors))


def whole_adapters(engine, read):
    """(name, what `read` gives of an adapter, put together), of this stage."""
    from megarl.engine import parallel
    from megarl.engine.hf.mapping import from_shards

    for key, parameter, names in adapter_parameters(engine):
        shards = [read(parameter)]
        if key.partition_dim >= 0:
            shards = from_shards(engine.shape, key.adapted, parallel.tensor_parallel_all_gather(shards[0]))
        elif len(names) > 1:
            raise AssertionError(f"{names} are not split")
        yield from zip(names, shards, strict=True)


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
    view = SimpleNamespace(runnable=engine.runnable, hf_tensors=partial(whole_adapters, engine))
    parameters = [item for chunk in engine.chunks for item in chunk.named_parameters()]
    trained = {name for name, parameter in parameters if hasattr(parameter, "main_grad")}
    changed = {name for (name, parameter), old in zip(parameters, before) if not torch.equal(parameter, old)}
    assert trained == changed == {name for name, _ in parameters if "lora_" in name}
    num_adapted = sum(parameter.numel() for name, parameter in parameters if "lora_" in name)
    num_moments = sum(state.numel() for state in engine._optimizer_tensors() if state.dim())
    return start, adapted, weights, result, full_gradients(view), (num_adapted, num_moments)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in SOAK_CASES)])
def test_logprobs_gradients_and_merged_weights_equal_adapters_put_into_transformers(references, case):
    model, world_size, role = (CASES | SOAK_CASES)[case]
    folder, adapters, hf_start, hf_adapted, hf_loss, hf_weights = references(model)
    data_parallel = world_size // (role.get("tensor_parallel", 1) * role.get("pipeline_parallel", 1))
    values = {name: parameter.detach() for name, parameter in adapters.items()}
    results = run_ranks(adapt_and_step, world_size, folder, values, role, **role)
    start, adapted, weights, gradients = (
        {name: x for result in results for name, x in result[which].items()} for which in (0, 1, 2, 4)
    )
    for i in range(len(SEQUENCES)):
        torch.testing.assert_close(torch.tensor(start[i][1:]), hf_start[i], atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(adapted[i][1:]), hf_adapted[i], atol=1e-5, rtol=0)
        assert (hf_start[i] - hf_adapted[i]).abs().max() > 0.01
    assert weights.keys() == hf_weights.keys()
    for name, weight in hf_weights.items():
        torch.testing.assert_close(torch.tensor(weights[name]), weight, atol=1e-6, rtol=0, msg=name)
    assert sum(result[3].get("loss", 0.0) for result in results) == pytest.approx(hf_loss, rel=1e-5)
    assert gradients.keys() == adapters.keys()
    for name, parameter in adapters.items():
        assert parameter.grad.abs().max() > 1e-5, name
        torch.testing.assert_close(torch.tensor(gradients[name]), parameter.grad, atol=1e-6, rtol=1e-4, msg=name)
    norm = torch.sqrt(sum((parameter.grad**2).sum() for parameter in adapters.values())).item()
    assert all(result[3]["grad_norm"] == pytest.approx(norm, rel=1e-5) for result in results)
    num_adapted, num_moments = (sum(result[5][which] for result in results) for which in (0, 1))
    assert num_moments * data_parallel == 2 * num_adapted > 0  # a replica's ranks share them


def initial_adapters(rank, folder, role):
    engine = make_engine(folder, lora=LORA, **role)
    return {name: matrix.detach().numpy() for name, matrix in whole_adapters(engine, lambda parameter: parameter)}


def test_adapters_start_alike_under_every_layout(references):
    folder, adapters, *_ = references("qwen2")
    role = TP_SP | {"pipeline_parallel": 2}
    (whole,) = run_ranks(initial_adapters, 1, folder, {})
    split = {name: x for rank in run_ranks(initial_adapters, 4, folder, role, **role) for name, x in rank.items()}
    assert whole.keys() == split.keys() == adapters.keys()
    for name, matrix in whole.items():
        assert (matrix == split[name]).all()
        bound = matrix.shape[1] ** -0.5
        assert not matrix.any() if name.endswith(".b") else 0.9 * bound < abs(matrix).max() <= bound
    assert len({matrix.tobytes() for name, matrix in whole.items() if name.endswith(".a")}) == len(adapters) * 4 // 11


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
    folder, *_ = references("llama")
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
    model, adapters, *_ = references("qwen2")
    folder, role = tmp_path_factory.mktemp("run") / "actor", TP_SP | {"pipeline_parallel": 2}
    values = {name: parameter.detach() for name, parameter in adapters.items()}
    return folder, *joined(run_ranks(save_and_go_on, 4, model, values, folder, role, **role))


def joined(results) -> list[dict[int, torch.Tensor]]:
    return [{i: torch.tensor(x) for rank in ranks for i, x in rank.items()} for ranks in zip(*results)]


@pytest.mark.parametrize("world_size, role", [(2, VPP), (2, {})], ids=["PP 2 VPP 2", "DP 2"])
def test_adapters_their_optimizer_and_reference_load_under_another_layout(references, saved, world_size, role):
    folder, *expected = saved
    model, _, without, *_ = references("qwen2")
    for before, after in zip(expected, joined(run_ranks(load_and_go_on, world_size, model, folder, role, **role))):
        assert before.keys() == after.keys() == set(range(len(SEQUENCES)))
        for i in before:
            torch.testing.assert_close(after[i], before[i], atol=2e-5, rtol=0)
    saved_at, reference, later = expected
    for i in reference:
        assert (later[i] - saved_at[i]).abs().max() > 1e-3
        torch.testing.assert_close(reference[i][1:], without[i], atol=1e-5, rtol=0)


def test_peft_and_merged_exports_give_the_engine_s_logprobs_in_transformers(references, saved, tmp_path):
    from transformers import AutoModelForCausalLM

    from megarl.engine.hf.mapping import from_shards
    from megarl.engine.hf.layout import stored_weights
    from megarl.engine.hf.peft import merge, stored_adapters, write_peft
    from megarl.engine.hf.shape import ModelShape
    from megarl.engine.hf.streaming import StoredTensors

    folder, expected, *_ = saved
    model, *_ = references("qwen2")
    shape, stored = ModelShape.read(model), StoredTensors(folder)
    listed = stored_adapters(shape, LORA)
    assert all(weight.fits(stored.sizes[weight.key]) for weight in listed)
    adapters = {weight.parameter: stored.read(weight.key, weight.index) for weight in listed}
    write_peft(tmp_path, str(model), LORA, shape, adapters, head={})
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(model)
    assert (settings["peft_type"], settings["task_type"]) == ("LORA", "CAUSAL_LM")
    peft = load_file(tmp_path / "adapter_model.safetensors")

    adapted = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, module in adapted.named_modules():
        if name.rpartition(".")[2] in settings["target_modules"]:
            a, b = (peft.pop(f"base_model.model.{name}.lora_{which}.weight") for which in "AB")
            scale = settings["lora_alpha"] / settings["r"]
            module.register_forward_hook(lambda _, x, output, a=a, b=b: output + scale * (x[0] @ a.T @ b.T))
    assert not peft

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
