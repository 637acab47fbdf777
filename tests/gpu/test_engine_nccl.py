"""The engine on GPUs over NCCL against transformers; `pytest -m gpu tests/gpu` on a machine with at least one GPU."""

import os
import pickle
import traceback
from pathlib import Path

import pytest
import torch
from gradients import full_gradients
from hf_models import hf_named_gradients, write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig, RoleConfig
from megarl.engine.offload import Snapshot
from megarl.sample import Prompt, Sample

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
SIZE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "head_dim": 64,
}
MODELS = {
    "qwen2": ("qwen2", True, {}),
    "llama": ("llama", False, {}),
    "qwen3": ("qwen3", False, {}),
    "qwen3-moe": ("qwen3_moe", False, {"moe_intermediate_size": 128}),
}
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}
VPP = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
CASES = [  # model, layers of, dtype, number of ranks, RoleConfig
    ("qwen2", "local", "float32", 1, {}),
    ("qwen2", "local", "float32", 2, TP_SP),
    ("llama", "local", "float32", 2, VPP),
    ("qwen2", "local", "float32", 2, {}),
    ("qwen2", "local", "bfloat16", 2, TP_SP),
    ("qwen2", "transformer_engine", "bfloat16", 1, {}),
    ("qwen2", "transformer_engine", "bfloat16", 1, {"recompute": "full"}),
    ("qwen2", "transformer_engine", "bfloat16", 1, {"recompute": "selective"}),
    ("qwen2", "transformer_engine", "bfloat16", 2, {}),
    ("qwen2", "transformer_engine", "bfloat16", 2, TP_SP),
    ("qwen3", "transformer_engine", "bfloat16", 2, TP_SP),
    ("llama", "transformer_engine", "bfloat16", 2, VPP),
    ("qwen2", "transformer_engine", "bfloat16", 2, {"context_parallel": 2}),
    ("llama", "transformer_engine", "bfloat16", 2, {"context_parallel": 2}),
    ("qwen3-moe", "transformer_engine", "bfloat16", 1, {}),
    ("qwen3-moe", "local", "float32", 2, {"expert_parallel": 2}),
    ("qwen3-moe", "transformer_engine", "bfloat16", 2, {"expert_parallel": 2}),
    ("qwen3-moe", "transformer_engine", "bfloat16", 2, TP_SP | {"expert_parallel": 2}),
]
# Absolute, of log-probs; relative, of the gradient's norm; relative in norm, of each gradient.
TOLERANCE = {"float32": (3e-4, 1e-5, 1e-3), "bfloat16": (0.15, 0.02, 0.1)}
# Rounded to bfloat16, two experts of a token change places now and then: the local layers show it on a CPU too. So the mean
# and the share of the tokens count, and the gradients by their norm.
CHANGED_SHARE, ROUTED_NORM, ROUTED_GRADIENT = 0.15, 0.1, 0.7
ROUTED_FLOAT32 = 1e-3  # the experts' weights carry attention's rounding on a GPU further


SEQUENCE_LENGTHS = (7, 19, 2, 13, 24, 130)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """model -> (folder, sequences, HF log-probs, loss, gradients), float32 on CPU."""
    from transformers import AutoModelForCausalLM

    made = {}
    for name, (family, tied, overrides) in MODELS.items():
        folder = write_hf_model(tmp_path_factory.mktemp("model"), family, tied, vocab_size=101, **SIZE | overrides)
        generator = torch.Generator().manual_seed(1)
        sequences = [torch.randint(0, 101, (n,), generator=generator).tolist() for n in SEQUENCE_LENGTHS]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        logprobs = [
            model(torch.tensor([s])).logits[0].log_softmax(-1)[torch.arange(len(s) - 1), s[1:]] for s in sequences
        ]
        loss = -torch.cat(logprobs).mean()
        loss.backward()
        made[name] = folder, sequences, [x.detach() for x in logprobs], loss.item(), hf_named_gradients(model)
    return made


@pytest.fixture(scope="module")
def results(references, tmp_path_factory):
    """case -> what each of its ranks returned, or why it failed.

    A process starts in half a minute on a GPU: one per rank serves all cases up to one that fails, then new ones do.
    """
    folders = {name: reference[:2] for name, reference in references.items()}
    found = {}

    def outcomes(case) -> list:
        while case_id(case) not in found:
            left = [other for other in CASES if other[3] == case[3] and case_id(other) not in found]
            found.update(until_one_fails(left, case[3], folders, tmp_path_factory.mktemp("outcomes")))
        return found[case_id(case)]

    return outcomes


def until_one_fails(cases, world_size, folders, place) -> dict[str, list]:
    """Outcomes of the first of `cases`, one at least; where some are left, the last failed or lost its process."""
    died = None
    try:
        run_ranks(serve, world_size, folders, cases, place, timeout_s=400)
    except (AssertionError, EOFError) as error:
        ends = [f"{path.name}: ...{path.read_text()[-4000:]}" for path in sorted(place.glob("output-*"))]
        died = "\n".join([f"the processes ended early: {type(error).__name__} {error}", *ends])
    found = {}
    for name in map(case_id, cases):
        files = [place / f"{name}-{rank}" for rank in range(world_size)]
        found[name] = [pickle.loads(file.read_bytes()) if file.exists() else died for file in files]
        if any(isinstance(outcome, str) for outcome in found[name]):
            break
    return found


def case_id(case) -> str:
    model, impl, dtype, world_size, role = case
    return "-".join([model, impl, dtype, f"{world_size} ranks", *(f"{key}={value}" for key, value in role.items())])


def serve(rank, folders, cases, place):
    """Leave a file in `place` for each case up to one that fails: what `score_and_step` returns, or the traceback.

    No further, for then the other ranks may be waiting for this one. What the process prints goes to a file as well.
    """
    from megarl.engine import parallel

    with open(place / f"output-{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    for case in cases:
        model, impl, dtype, world_size, role = case
        parallel.shutdown()
        port = 20000 + os.getppid() % 9000 + CASES.index(case)  # below those that sockets get by themselves
        parallel.initialize(rank, world_size, "127.0.0.1", port, RoleConfig(**role), seed=1, timeout_s=60)
        print(case_id(case), flush=True)
        try:
            outcome = score_and_step(*folders[model], dtype, impl, role)
        except Exception:
            outcome = traceback.format_exc()
        (place / f"{case_id(case)}-{rank}").write_bytes(pickle.dumps(outcome))
        if isinstance(outcome, str):
            return


def score_and_step(folder, sequences, dtype, impl, role):
    engine = make_engine(folder, dtype, max_tokens=160, transformer_impl=impl, offload="all", **role)
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    samples = [Sample.from_response(Prompt([], s[:1]), s[1:], group_id=0, index=i) for i, s in enumerate(sequences)]
    logprobs = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, temperature=1.0).items()}
    engine.capture_reference()
    for phase, is_held in (("generate", False), ("update", True)):
        engine.place(phase)
        assert all((weight.untyped_storage().nbytes() > 0) == is_held for weight in engine.parameters())
    engine.train_step(samples, sft_loss, learning_rate=0.0)  # only from the second step on is the reduction overlapped
    steps = [engine.train_step(samples, sft_loss, learning_rate=1e-3)]
    gradients = full_gradients(engine)
    steps += [engine.train_step(samples, sft_loss, learning_rate=1e-3) for _ in range(2)]
    reference = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, 1.0, reference=True).items()}
    exchanged = impl == "local" or "context_parallel" in role or survives_local_layers(engine, folder, dtype, role)
    return logprobs, steps, reference, gradients, exchanged


def survives_local_layers(engine, folder, dtype, role) -> bool:
    """Whether local layers read the checkpoint of these, and these the one of those, bit for bit."""
    from megarl.engine import checkpoint

    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    checkpoint.save(engine, folder, Path(folder, "of-these"))
    local = make_engine(folder, dtype, transformer_impl="local", **role)
    checkpoint.load(local, Path(folder, "of-these"))
    same = all(torch.equal(tensor, before[name]) for name, tensor in local.hf_tensors())
    checkpoint.save(local, folder, Path(folder, "of-those"))
    again = make_engine(folder, dtype, transformer_impl="transformer_engine", **role)
    checkpoint.load(again, Path(folder, "of-those"))
    return same and all(torch.equal(tensor, before[name]) for name, tensor in again.hf_tensors())


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_logprobs_and_gradients_equal_transformers(references, results, case):
    model, _, dtype, world_size, _ = case
    if world_size > NUM_GPUS:
        pytest.skip(f"needs {world_size} GPUs")
    _, sequences, hf_logprobs, hf_loss, hf_gradients = references[model]
    tolerance, norm_tolerance, gradient_tolerance = TOLERANCE[dtype]
    ranks = results(case)
    failures = {outcome for outcome in ranks if isinstance(outcome, str)}
    assert not failures, "\n".join(failures)
    logprobs = {i: x for rank in ranks for i, x in rank[0].items()}
    differences = torch.cat([torch.tensor(logprobs[i][1:]) - expected for i, expected in enumerate(hf_logprobs)]).abs()
    changed, changed_share = (differences > tolerance).float().mean(), 0.0
    if "moe" in model and dtype == "float32":
        tolerance = ROUTED_FLOAT32
    elif "moe" in model:
        changed_share, norm_tolerance, gradient_tolerance = CHANGED_SHARE, ROUTED_NORM, ROUTED_GRADIENT
    assert changed <= changed_share and differences.mean() < tolerance / 2, differences
    assert all(rank[4] for rank in ranks)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in hf_gradients.values())).item()
    losses = [sum(rank[1][step].get("loss", 0.0) for rank in ranks) for step in range(3)]
    gradients = {name: torch.tensor(x) for rank in ranks for name, x in rank[3].items()}
    assert gradients.keys() == hf_gradients.keys()
    errors = {name: float((gradients[name] - x).norm() / x.norm()) for name, x in hf_gradients.items()}
    print(f"\n{case_id(case)}: gradient norm {ranks[0][1][0]['grad_norm']:.5f} for {norm:.5f}, "
          f"largest relative error of a gradient {max(errors.values()):.2e}, {changed:.1%} of the log-probs changed")  # fmt: skip
    for rank in ranks:
        assert rank[1][0]["grad_norm"] == pytest.approx(norm, rel=norm_tolerance)
    assert losses[0] == pytest.approx(hf_loss, rel=norm_tolerance) and losses[0] > losses[1] > losses[2]
    assert {i: x for rank in ranks for i, x in rank[2].items()} == logprobs  # the reference: the weights before
    assert max(errors.values()) < gradient_tolerance, {k: v for k, v in errors.items() if v > gradient_tolerance}


def test_dropped_host_memory_can_be_locked_again():
    """Blocks below and above the size from which malloc maps pages for itself."""
    for _ in range(20):
        for num_bytes in (10_000, 3_000_001, 40_000_000):
            snapshots = [Snapshot(), Snapshot()]
            values = torch.arange(num_bytes, device="cuda").to(torch.uint8)
            for snapshot in snapshots:
                snapshot.take([values])
                copy = torch.zeros_like(values)
                snapshot.put([copy])
                assert torch.equal(copy, values)
