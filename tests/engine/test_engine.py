import pytest
import torch
from hf_models import write_hf_model
from ranks import run_ranks

from megarl.algorithms.losses import sft_loss
from megarl.config import OptimizerConfig
from megarl.sample import Prompt, Sample


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_hf_model(tmp_path_factory.mktemp("model"), "qwen2", True, num_layers=2))


def sample(ids, prompt_length=1, trained=True):
    made = Sample.from_response(Prompt([], ids[:prompt_length]), ids[prompt_length:], group_id=0, index=0)
    made.loss_mask &= trained
    return made


def weights(engine):
    return torch.cat([tensor.flatten() for _, tensor in engine.hf_tensors()]).clone()


def per_token_gradient(rank, folder, microbatches):
    """Gradient norm of sum of -logprob * c / N, for given micro-batches' samples; N is that of all of them."""
    from megarl.engine.engine import Engine

    engine = Engine(folder, "float32", max_tokens_per_gpu=6)
    engine.use_optimizer(OptimizerConfig())
    result = engine.train_step([s for batch in microbatches for s in batch], sft_loss, 1e-3, 1.0)
    return result["grad_norm"], result.get("loss")


def test_token_mean_is_over_all_ranks_when_they_hold_unequal_numbers(folder):
    """O10: three trained tokens on one rank and one on the other."""
    batches = [[sample([5, 6, 7, 8, 9, 3])], [sample([5, 4])]]
    (one,) = run_ranks(per_token_gradient, 1, folder, batches)
    two = run_ranks(per_token_gradient, 2, folder, batches)
    assert sum(loss for _, loss in two) == pytest.approx(one[1], rel=1e-6)
    assert two[0][0] == two[1][0] == pytest.approx(one[0], rel=1e-5)


def test_a_rank_without_trained_tokens_takes_part(folder):
    """O11 (a), (b): one rank's samples are all masked, or it has none at all."""
    with_masked = run_ranks(per_token_gradient, 2, folder, [[sample([5, 6, 7, 8, 9])], [sample([5, 4, 3, 2], trained=False)]])
    without = run_ranks(per_token_gradient, 2, folder, [[sample([5, 6, 7, 8, 9])]])
    (one,) = run_ranks(per_token_gradient, 1, folder, [[sample([5, 6, 7, 8, 9])]])
    for results in (with_masked, without):
        assert sum(loss for _, loss in results) == pytest.approx(one[1], rel=1e-6)
        assert results[0][0] == pytest.approx(one[0], rel=1e-5)


def reference_check(rank, folder):
    from megarl.engine.engine import Engine

    engine = Engine(folder, "float32", 1000)
    engine.use_optimizer(OptimizerConfig())
    samples = [sample([5, 6, 7, 8, 9])]
    first = {i: x[0] for i, x in engine.logprobs(samples, 1.0).items()}
    engine.capture_reference()
    engine.train_step(samples, sft_loss, 1e-2, 1.0)
    trained = weights(engine)
    now = {i: x[0] for i, x in engine.logprobs(samples, 1.0).items()}
    reference = {i: x[0] for i, x in engine.logprobs(samples, 1.0, reference=True).items()}
    return (
        all(torch.equal(reference[i], first[i]) for i in first),
        all((now[i] - first[i]).abs().max() > 1e-3 for i in first),
        torch.equal(weights(engine), trained),
    )


def test_reference_logprobs_are_those_of_the_captured_weights_and_leave_the_actor_as_it_was(folder):
    assert run_ranks(reference_check, 2, folder, tensor_parallel=2) == [(True, True, True)] * 2


def not_finite(rank, folder):
    from megarl.engine.engine import Engine

    engine = Engine(folder, "float32", 1000)
    engine.use_optimizer(OptimizerConfig())
    before = weights(engine)

    def broken(logprobs, batch):
        return logprobs.sum() * float("nan"), {}

    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        engine.train_step([sample([5, 6, 7])], broken, 1e-2, 1.0)
    return torch.equal(weights(engine), before)


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_no_weight(folder):
    assert run_ranks(not_finite, 1, folder) == [True]


def decayed(rank, folder):
    """Weights after a step with a zero loss and a large weight decay."""
    from megarl.engine.engine import Engine

    engine = Engine(folder, "float32", 1000)
    before = dict((name, tensor.clone()) for name, tensor in engine.hf_tensors())
    engine.use_optimizer(OptimizerConfig(weight_decay=0.5))
    engine.train_step([sample([5, 6, 7])], lambda logprobs, batch: (logprobs.sum() * 0.0, {}), 0.1, 1.0)
    after = dict(engine.hf_tensors())
    return {name: float((after[name] / before[name]).mean()) for name in after}


def test_weight_decay_acts_on_matrices_alone(folder):
    (ratios,) = run_ranks(decayed, 1, folder)
    for name, ratio in ratios.items():
        is_matrix = "proj.weight" in name or "embed" in name
        assert ratio == pytest.approx(0.95 if is_matrix else 1.0, abs=1e-5), name
