"""The engine against transformers on the same weights: logits, log-probs, loss and every gradient, by family and layout."""

import pytest
import torch
from gradients import full_gradients
from hf_models import hf_named_gradients, write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101  # padded inside to 128 or 256
LAYOUTS = {  # number of ranks, RoleConfig
    "one rank": (1, {}),
    "TP 2": (2, {"tensor_parallel": 2}),
    "TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_parallel": 2}),
    "PP 2 VPP 2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "TP 2 PP 2 SP": (4, {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}),
    "TP 2 PP 2 VPP 2 SP": (
        4, {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "sequence_parallel": True},
    ),
    "DP 2": (2, {}),
    "DP 2 without overlap": (2, {"overlap_grad_reduce": False}),
    "DP 2 PP 2": (4, {"pipeline_parallel": 2}),
    "full recompute, TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True, "recompute": "full"}),
    "selective recompute": (1, {"recompute": "selective"}),
    "attention recompute": (1, {"recompute": "selective", "recompute_modules": ["core_attn"]}),
}  # fmt: skip
MOE_LAYOUTS = {
    "one rank": (1, {}),
    "DP 2 EP 2": (2, {"expert_parallel": 2}),
    "DP 2 EP 1": (2, {}),
    "TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "TP 2 SP EP 2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
    "TP 2 SP ETP 2": (2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2}),
    "PP 2 DP 2 EP 2": (4, {"pipeline_parallel": 2, "expert_parallel": 2}),
    "PP 2 VPP 2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "DP 4 EP 2": (4, {"expert_parallel": 2}),
    "selective recompute, DP 2 EP 2": (2, {"recompute": "selective", "expert_parallel": 2}),
    "full recompute, DP 2 EP 2": (2, {"recompute": "full", "expert_parallel": 2}),
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {  # family, tied, overrides, layouts: the families share all code but their tables, so most need few
    "qwen2-tied": ("qwen2", True, {}, LAYOUTS),
    "llama2": ("llama", False, {"num_key_value_heads": 8}, ["TP 2 SP"]),
    "llama3": ("llama", False, {"rope_parameters": LLAMA3_ROPE}, ["TP 2 PP 2 VPP 2 SP", "one rank"]),
    "smollm2": ("llama", True, {"num_attention_heads": 4, "num_key_value_heads": 2}, ["PP 2", "TP 2"]),
    "qwen3": ("qwen3", False, {}, ["TP 2 PP 2 SP", "PP 2 VPP 2"]),
    "mistral": ("mistral", False, {}, ["TP 2 SP", "DP 2"]),
    "qwen3-moe": ("qwen3_moe", False, {}, MOE_LAYOUTS),
    "qwen3-moe, weights of the top k as they are": ("qwen3_moe", True, {"norm_topk_prob": False}, ["DP 2 EP 2"]),
}
CASES = [(model, layout) for model, (*_, layouts) in MODELS.items() for layout in layouts]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """model -> (folder, sequences, HF logits per sequence, HF token-mean loss, HF gradients by name); each made once."""
    from transformers import AutoModelForCausalLM

    made = {}

    def get(name):
        if name not in made:
            family, tied, overrides, _ = MODELS[name]
            folder = write_hf_model(tmp_path_factory.mktemp(family), family, tied, VOCAB_SIZE, **overrides)
            generator = torch.Generator().manual_seed(1)
            sequences = [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (7, 19, 2, 13, 24)]
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            logits = [model(torch.tensor([s])).logits[0] for s in sequences]
            losses = [
                torch.nn.functional.cross_entropy(x[:-1], torch.tensor(s[1:]), reduction="none")
                for x, s in zip(logits, sequences)
            ]
            loss = torch.cat(losses).mean()
            loss.backward()
            made[name] = folder, sequences, [x.detach() for x in logits], loss.item(), hf_named_gradients(model)
        return made[name]

    return get


def samples_of(sequences):
    return [Sample.from_response(Prompt([], s[:1]), s[1:], group_id=0, index=i) for i, s in enumerate(sequences)]


def forward_and_step(rank, folder, sequences, role):
    """({sample: full logits}, {sample: log-probs}, train_step's result, gradients by HF name) of this rank."""
    from megarl.engine import engine as engine_module
    from megarl.engine import parallel

    engine = make_engine(folder, max_tokens=40, **role)
    seen = []
    inner = engine_module.logprobs_and_entropy

    def recording(logits_TV, *rest):
        seen.append(torch.cat(parallel.tensor_parallel_all_gather(logits_TV.detach()), dim=1))
        return inner(logits_TV, *rest)

    samples = samples_of(sequences)
    engine_module.logprobs_and_entropy = recording
    logprobs = {i: values.tolist() for i, (values, _) in engine.logprobs(samples, temperature=1.0).items()}
    engine_module.logprobs_and_entropy = inner
    plan, _ = engine._microbatches(samples)
    logits = {}
    for indices, logits_TV in zip(plan, seen):
        lengths = [len(sequences[i]) for i in indices]
        logits |= {i: x.numpy() for i, x in zip(indices, logits_TV[: sum(lengths)].split(lengths))}
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    engine.train_step(samples, sft_loss, learning_rate=0.0)  # only from the second step on is the reduction overlapped
    result = engine.train_step(samples, sft_loss, learning_rate=1e-3)
    return logits, logprobs, result, full_gradients(engine)


@pytest.mark.parametrize("model, layout", CASES, ids=[f"{model}-{layout}" for model, layout in CASES])
def test_logits_loss_and_gradients_equal_transformers(references, model, layout):
    folder, sequences, hf_logits, hf_loss, hf_gradients = references(model)
    world_size, role = (LAYOUTS | MOE_LAYOUTS)[layout]
    results = run_ranks(forward_and_step, world_size, folder, sequences, role, **role)
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
    gradients = {name: x for result in results for name, x in result[3].items()}
    assert gradients.keys() == hf_gradients.keys()
    for name, expected in hf_gradients.items():
        assert expected.abs().max() > 1e-5, name
        torch.testing.assert_close(torch.tensor(gradients[name]), expected, atol=1e-6, rtol=1e-4, msg=name)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in hf_gradients.values())).item()
    for result in results:
        assert result[2]["grad_norm"] == pytest.approx(norm, rel=1e-5)
