"""The engine against transformers on the same weights: logits, log-probs, loss and gradient norm in every layout."""

import pytest
import torch
from hf_models import write_hf_model
from ranks import run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101  # padded inside to 128 or 256
LAYOUTS = {  # tensor, pipeline, data parallel, sequence parallel
    "one rank": (1, 1, 1, False),
    "TP 2": (2, 1, 1, False),
    "TP 2 SP": (2, 1, 1, True),
    "PP 2": (1, 2, 1, False),
    "TP 2 PP 2": (2, 2, 1, False),
    "TP 2 PP 2 SP": (2, 2, 1, True),
    "DP 2": (1, 1, 2, False),
}


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "qwen2-tied": ("qwen2", True, {}),
    "llama3-untied": ("llama", False, {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("qwen3", False, {"head_dim": 16}),
    "mistral": ("mistral", False, {"head_dim": 8, "sliding_window": None}),
}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def reference(request, tmp_path_factory):
    """(model folder, sequences, HF logits per sequence, HF token-mean loss, HF gradient norm)."""
    from transformers import AutoModelForCausalLM

    family, tied, overrides = request.param
    folder = write_hf_model(tmp_path_factory.mktemp(family), family, tied, VOCAB_SIZE, **overrides)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (7, 19, 2, 13, 24)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = [model(torch.tensor([s])).logits[0] for s in sequences]
    losses = [torch.nn.functional.cross_entropy(x[:-1], torch.tensor(s[1:]), reduction="none") for x, s in zip(logits, sequences)]
    loss = torch.cat(losses).mean()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())).item()
    return folder, sequences, [x.detach() for x in logits], loss.item(), norm


def samples_of(sequences):
    return [Sample.from_response(Prompt([], s[:1]), s[1:], group_id=0, index=i) for i, s in enumerate(sequences)]


def forward_and_step(rank, folder, sequences, sequence_parallel):
    """({sample: full logits}, {sample: log-probs}, train_step's result) of this rank."""
    from megarl.engine import parallel, step
    from megarl.engine.engine import Engine

    engine = Engine(str(folder), "float32", max_tokens_per_gpu=40, sequence_parallel=sequence_parallel)
    seen = []
    inner = step.logprobs_and_entropy

    def recording(logits_TV, *rest):
        seen.append(torch.cat(parallel.tensor_parallel_all_gather(logits_TV.detach()), dim=1))
        return inner(logits_TV, *rest)

    samples = samples_of(sequences)
    step.logprobs_and_entropy = recording
    logprobs = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, temperature=1.0).items()}
    step.logprobs_and_entropy = inner
    plan, _ = engine._microbatches(samples)
    logits = {}
    for indices, logits_TV in zip(plan, seen):
        lengths = [len(sequences[i]) for i in indices]
        logits |= {i: x.numpy() for i, x in zip(indices, logits_TV[: sum(lengths)].split(lengths))}
    engine.use_optimizer(OptimizerConfig())
    return logits, logprobs, engine.train_step(samples, sft_loss, learning_rate=1e-3, temperature=1.0)


@pytest.mark.parametrize("tensor, pipeline, data, sequence_parallel", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_logits_loss_and_gradient_norm_equal_transformers(reference, tensor, pipeline, data, sequence_parallel):
    folder, sequences, hf_logits, hf_loss, hf_norm = reference
    world_size = tensor * pipeline * data
    results = run_ranks(
        forward_and_step,
        world_size,
        folder,
        sequences,
        sequence_parallel,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )
    logits = {i: x for result in results for i, x in result[0].items()}
    logprobs = {i: x for result in results for i, x in result[1].items()}
    assert logits.keys() == logprobs.keys() == set(range(len(sequences)))
    for i, expected in enumerate(hf_logits):
        assert logits[i].shape[1] >= VOCAB_SIZE
        torch.testing.assert_close(torch.tensor(logits[i][:, :VOCAB_SIZE]), expected, atol=1e-5, rtol=0)
        expected_logprobs = expected.log_softmax(-1)[torch.arange(len(expected) - 1), sequences[i][1:]]
        torch.testing.assert_close(torch.tensor(logprobs[i][1:]), expected_logprobs, atol=1e-5, rtol=0)
        assert logprobs[i][0] == 0.0
    assert sum(result[2].get("loss", 0.0) for result in results) == pytest.approx(hf_loss, rel=1e-5)
    for result in results:
        assert result[2]["grad_norm"] == pytest.approx(hf_norm, rel=1e-5)


def trained_weights(rank, folder, sequences, max_tokens):
    from megarl.engine.engine import Engine

    engine = Engine(str(folder), "float32", max_tokens)
    engine.use_optimizer(OptimizerConfig())
    losses = [engine.train_step(samples_of(sequences), sft_loss, 1e-2, 1.0).get("loss", 0.0) for _ in range(3)]
    return losses, {name: tensor.clone().numpy() for name, tensor in engine.hf_tensors() if tensor.numel()}


def test_training_does_not_depend_on_how_the_batch_is_split(reference):
    folder, sequences, *_ = reference
    ((one_losses, one_weights),) = run_ranks(trained_weights, 1, folder, sequences, 1000)
    assert one_losses[0] > one_losses[1] > one_losses[2]
    for max_tokens, world_size, layout in [(1, 1, {}), (30, 2, {}), (30, 4, {"tensor_parallel": 2, "pipeline_parallel": 2})]:
        results = run_ranks(trained_weights, world_size, folder, sequences, max_tokens, **layout)
        assert [sum(r[0][i] for r in results) for i in range(3)] == pytest.approx(one_losses, rel=1e-5)
        weights = {name: tensor for result in results for name, tensor in result[1].items()}
        assert weights.keys() == one_weights.keys()
        for name, tensor in weights.items():  # Adam divides tiny gradients by tiny ones: single entries may differ
            one = torch.tensor(one_weights[name])
            assert (torch.tensor(tensor) - one).norm() < 1e-3 * one.norm(), name
