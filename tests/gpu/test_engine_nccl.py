"""The engine on GPUs over NCCL; `pytest -m gpu tests/gpu` on a machine with at least one GPU."""

import pytest
import torch
from hf_models import write_hf_model
from ranks import run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.sample import Prompt, Sample

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
LAYOUTS = [layout for layout in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)] if layout[0] * layout[1] * layout[2] <= NUM_GPUS]


@pytest.fixture(scope="module", params=[("qwen2", True), ("llama", False)], ids=["qwen2-tied", "llama-untied"])
def reference(request, tmp_path_factory):
    """(folder, sequences, HF log-probs, gradient norm, loss), float32 on CPU."""
    from transformers import AutoModelForCausalLM

    folder = write_hf_model(tmp_path_factory.mktemp("model"), *request.param, vocab_size=101)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 101, (n,), generator=generator).tolist() for n in (7, 19, 2, 13, 24)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = [
        model(torch.tensor([s])).logits[0].log_softmax(-1)[torch.arange(len(s) - 1), s[1:]] for s in sequences
    ]
    loss = -torch.cat(logprobs).mean()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())).item()
    return folder, sequences, [x.detach() for x in logprobs], norm, loss.item()


def score_and_step(rank, folder, sequences, dtype):
    from megarl.engine.engine import Engine

    engine = Engine(str(folder), dtype, max_tokens_per_gpu=40)
    engine.use_optimizer(OptimizerConfig())
    samples = [Sample.from_response(Prompt([], s[:1]), s[1:], group_id=0, index=i) for i, s in enumerate(sequences)]
    logprobs = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, temperature=1.0).items()}
    engine.capture_reference()
    results = [engine.train_step(samples, sft_loss, learning_rate=1e-3, temperature=1.0) for _ in range(3)]
    reference = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, 1.0, reference=True).items()}
    return logprobs, results, reference


@pytest.mark.parametrize("tensor, pipeline, data", LAYOUTS)
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-4), ("bfloat16", 0.15)])
def test_logprobs_and_gradient_norm_equal_transformers(reference, tensor, pipeline, data, dtype, tolerance):
    folder, sequences, hf_logprobs, hf_norm, hf_loss = reference
    results = run_ranks(
        score_and_step,
        tensor * pipeline * data,
        folder,
        sequences,
        dtype,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        timeout_s=240,
    )
    logprobs = {i: x for result in results for i, x in result[0].items()}
    for i, expected in enumerate(hf_logprobs):
        torch.testing.assert_close(torch.tensor(logprobs[i][1:]), expected, atol=tolerance, rtol=0)
    norm_tolerance = 1e-5 if dtype == "float32" else 0.02
    for _, steps, _ in results:
        assert steps[0]["grad_norm"] == pytest.approx(hf_norm, rel=norm_tolerance)
    losses = [sum(result[1][step].get("loss", 0.0) for result in results) for step in range(3)]
    assert losses[0] == pytest.approx(hf_loss, rel=norm_tolerance) and losses[0] > losses[1] > losses[2]
    assert {i: x for result in results for i, x in result[2].items()} == logprobs  # the reference: the weights before
