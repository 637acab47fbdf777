from functools import partial

import pytest
import torch
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import policy_loss, sft_loss
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


LOSSES = {
    "sft": sft_loss,
    "policy, token mean": partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="token_mean"),
    "policy, sequence mean": partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="sequence_mean"),
}


def gradients(rank, folder, samples, loss):
    """(loss of this rank, all gradients after the reduction) with micro-batches of one sample each."""
    engine = make_engine(folder, max_tokens=1, overlap_grad_reduce=False)
    engine.use_optimizer(OptimizerConfig())
    gradient = []
    take_step = engine.optimizer.step

    def recording_step():
        gradient.extend(p.main_grad.clone() for p in engine.chunks[0].parameters())
        return take_step()

    engine.optimizer.step = recording_step
    result = engine.train_step(samples, loss, 1e-3, 1.0)
    return result.get("loss", 0.0), torch.cat([g.flatten() for g in gradient]).numpy()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_has_the_same_loss_and_gradient_on_one_rank_and_on_two_with_unequal_shares(folder, loss):
    """O10: three trained tokens on one rank, one on the other."""
    samples = [sample([5, 6, 7, 8]), sample([5, 4])]
    for s, advantage in zip(samples, (1.0, -0.5)):
        s.old_logprobs = torch.full((len(s.token_ids),), -4.0)
        s.advantages = torch.full((len(s.token_ids),), advantage)
    ((one_loss, one_gradient),) = run_ranks(gradients, 1, folder, samples, LOSSES[loss])
    two = run_ranks(gradients, 2, folder, samples, LOSSES[loss])
    assert sum(rank_loss for rank_loss, _ in two) == pytest.approx(one_loss, rel=1e-5)
    # The distributed optimizer leaves on each rank the reduced gradient of its own shard, and its own part elsewhere.
    differences = torch.stack([(torch.tensor(gradient) - torch.tensor(one_gradient)).abs() for _, gradient in two])
    assert torch.tensor(one_gradient).abs().max() > 1e-3
    assert differences.min(dim=0).values.max() < 1e-6 and differences.max() > 1e-6


def norm_and_loss(rank, folder, samples):
    engine = make_engine(folder, max_tokens=6)
    engine.use_optimizer(OptimizerConfig())
    result = engine.train_step(samples, sft_loss, 1e-3, 1.0)
    return result["grad_norm"], result["loss"]


def test_a_rank_without_trained_tokens_takes_part(folder):
    """O11 (a), (b): one rank's samples are all masked, or it has none at all."""
    with_masked = run_ranks(norm_and_loss, 2, folder, [sample([5, 6, 7, 8, 9]), sample([5, 4, 3, 2], trained=False)])
    without = run_ranks(norm_and_loss, 2, folder, [sample([5, 6, 7, 8, 9])])
    (one,) = run_ranks(norm_and_loss, 1, folder, [sample([5, 6, 7, 8, 9])])
    for results in (with_masked, without):
        assert sum(loss for _, loss in results) == pytest.approx(one[1], rel=1e-6)
        assert results[0][0] == pytest.approx(one[0], rel=1e-5)


def reference_check(rank, folder, dtype):
    engine = make_engine(folder, dtype)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_logprobs_are_those_of_the_captured_weights_and_leave_the_actor_as_it_was(folder, dtype):
    assert run_ranks(reference_check, 2, folder, dtype, tensor_parallel=2) == [(True, True, True)] * 2


def not_finite(rank, folder):
    engine = make_engine(folder)
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
    engine = make_engine(folder)
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
