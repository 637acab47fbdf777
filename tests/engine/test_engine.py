from functools import partial

import pytest
import torch
from gradients import full_gradients
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import policy_loss, sft_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
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


def moving_reference(rank, folder, dtype):
    """Distances of the reference's weights from 0.75 * first + 0.25 * second, then once more; and from a plain copy."""
    engine = make_engine(folder, dtype)
    engine.use_optimizer(OptimizerConfig())
    expected = weights(engine).float()
    engine.capture_reference(0.75)
    distances = []
    for ema_decay in (0.75, 0.75, None):
        engine.train_step([sample([5, 6, 7, 8, 9])], sft_loss, 1e-2, 1.0)
        expected = weights(engine).float() if ema_decay is None else 0.75 * expected + 0.25 * weights(engine).float()
        engine.capture_reference(ema_decay)
        with engine._reference_weights():
            distances.append((weights(engine) - expected.to(engine.dtype)).abs().max().item())
    moved = (weights(engine).float() - expected).abs().max().item()
    return distances, moved


@pytest.mark.parametrize("dtype, rounding", [("float32", 1e-6), ("bfloat16", 0.0)])
def test_a_moving_reference_is_an_average_in_float32(folder, dtype, rounding):
    for distances, moved in run_ranks(moving_reference, 1, folder, dtype):
        assert max(distances) <= rounding and moved == 0


def nan_loss(logprobs, batch):
    return logprobs.sum() * float("nan"), {}


def overflowing_gradient(logprobs, batch):
    return torch.sinh(logprobs.sum() * 1e10) * 0 + logprobs.sum(), {}  # its derivative is inf * 0


def skip_and_go_on(rank, folder, loss, broken_rank):
    """(results of a broken step and of a sound one, were the weights kept, did the sound step change them)."""
    engine = make_engine(folder)
    engine.use_optimizer(OptimizerConfig())
    samples = [sample([5, 6, 7]), sample([8, 9, 4])]
    before = weights(engine)
    broken = engine.train_step(samples, loss if rank == broken_rank else sft_loss, 1e-2)
    kept = torch.equal(weights(engine), before)
    sound = engine.train_step(samples, sft_loss, 1e-2)
    return broken, sound, kept, not torch.equal(weights(engine), before)


@pytest.mark.parametrize("loss", [nan_loss, overflowing_gradient])
@pytest.mark.parametrize("broken_rank", [0, 1])
def test_a_loss_or_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(folder, loss, broken_rank):
    results = run_ranks(skip_and_go_on, 2, folder, loss, broken_rank)
    assert [(broken["skipped"], sound["skipped"]) for broken, sound, _, _ in results] == [(1.0, 0.0)] * 2
    _, _, kept, changed = results[0]  # the rank that has the weights
    assert kept and changed


def broken_logprobs(rank, folder):
    engine = make_engine(folder)
    engine.use_optimizer(OptimizerConfig())
    with torch.no_grad():
        engine.chunks[0].decoder.final_layernorm.weight[3] = float("nan")
    return engine.train_step([sample([5, 6, 7]), sample([8, 9, 4, 2], prompt_length=2)], sft_loss, 1e-2)


def test_logprobs_that_are_not_finite_are_counted_and_skip_the_step(folder):
    (result,) = run_ranks(broken_logprobs, 1, folder)
    assert result["skipped"] == 1.0 and result["nonfinite_logprobs"] == 4


def trained(engine, samples, place):
    """Losses and weights of three steps, between which `place` moves the engine to host memory and back."""
    engine.use_optimizer(OptimizerConfig())
    losses = []
    for _ in range(3):
        place(engine, "update")
        losses.append(engine.train_step(samples, sft_loss, 1e-2).get("loss", 0.0))
        place(engine, "generate")
        place(engine, "score")
        engine.logprobs(samples, 1.0)
    return losses, weights(engine)


def with_and_without_offload(rank, folder, dtype, offload):
    samples = [sample([5, 6, 7, 8, 9]), sample([8, 9, 4])]
    stay = trained(make_engine(folder, dtype), samples, lambda engine, phase: None)
    engine = make_engine(folder, dtype, offload=offload)
    engine.capture_reference()
    held = {}

    def place(engine, phase):
        engine.place(phase)
        groups = {
            "weights": engine._weights(),
            "gradients": engine._gradients(),
            "optimizer": engine._optimizer_tensors(),
        }
        held[phase] = {
            name: sum(tensor.untyped_storage().nbytes() for tensor in tensors) for name, tensors in groups.items()
        }

    moved = trained(engine, samples, place)
    engine.place("generate")
    refused = []
    for call in (lambda: engine.logprobs(samples, 1.0), lambda: engine.train_step(samples, sft_loss, 1e-2)):
        try:
            call()
        except AssertionError as error:
            refused.append(str(error))
    return stay[0] == moved[0], torch.equal(stay[1], moved[1]), held, refused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_frees_memory_between_phases_and_changes_no_bit(folder, dtype, offload):
    for same_losses, same_weights, held, refused in run_ranks(with_and_without_offload, 2, folder, dtype, offload):
        assert same_losses and same_weights
        assert held["generate"]["gradients"] == held["generate"]["optimizer"] == held["score"]["optimizer"] == 0
        assert (held["generate"]["weights"] == 0) == (offload == "all") and held["score"]["weights"] > 0
        assert min(held["update"].values()) > 0
        expected = ["place('score') comes first: the engine is placed for 'generate'"] if offload == "all" else []
        assert refused == [*expected, "place('update') comes first: the engine is placed for 'generate'"]


def value_engine(rank, folder, sequence_parallel, std, bias):
    from megarl.engine.engine import Engine

    role = CriticConfig(
        sequence_parallel=sequence_parallel, value_head_std=std, value_head_bias=bias, max_tokens_per_gpu=8
    )
    engine = Engine(ModelConfig(path=folder, dtype="float32"), role, head="value")
    engine.use_optimizer(OptimizerConfig())
    samples = [sample([5, 6, 7, 8, 9]), sample([8, 9, 4], prompt_length=2), sample([4, 4])]
    first = {i: x.tolist() for i, x in engine.values(samples).items()}
    heads = {name: x.clone().numpy() for name, x in engine.hf_tensors() if name.startswith("score") and x.numel()}

    def to_one(values, batch):
        return torch.where(batch.loss_mask, (values - 1) ** 2, 0.0).sum() / batch.num_loss_tokens, {}

    norm = engine.train_step(samples, to_one, 1e-2)["grad_norm"]
    for _ in range(20):
        engine.train_step(samples, to_one, 1e-2)
    return first, heads, norm, {i: x.tolist() for i, x in engine.values(samples).items()}


def hf_values(folder, head, bias, sequences):
    """The values, and the gradient norm of the mean of (value - 1)^2 over trained tokens, by transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    score = torch.nn.Linear(64, 1, bias)
    with torch.no_grad():
        score.weight.copy_(torch.tensor(head))
        score.bias is None or score.bias.zero_()
    values = {i: score(model(torch.tensor([ids])).last_hidden_state)[0, :-1, 0] for i, (ids, _) in enumerate(sequences)}
    trained = torch.cat([values[i][prompt_length - 1 :] for i, (_, prompt_length) in enumerate(sequences)])
    ((trained - 1) ** 2).mean().backward()
    parameters = [p for p in [*model.parameters(), *score.parameters()] if p.grad is not None]
    return values, torch.sqrt(sum((p.grad**2).sum() for p in parameters)).item()


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2}])
@pytest.mark.parametrize("std, bias", [(0.001, True), (0.3, False)])
def test_a_value_head_gives_one_value_per_token_as_transformers_does_and_learns(folder, layout, std, bias):
    sequences = [([5, 6, 7, 8, 9], 1), ([8, 9, 4], 2), ([4, 4], 1)]
    results = run_ranks(value_engine, 2, folder, layout.get("sequence_parallel", False), std, bias, **layout)
    heads = {name: head for result in results for name, head in result[1].items()}
    assert heads.keys() == ({"score.weight", "score.bias"} if bias else {"score.weight"})
    assert abs(heads["score.weight"].std() / std - 1) < 0.25 and (not bias or heads["score.bias"] == 0)
    expected, norm = hf_values(folder, heads["score.weight"], bias, sequences)
    before = {i: x for result in results for i, x in result[0].items()}
    after = {i: x for result in results for i, x in result[3].items()}
    for i, (ids, prompt_length) in enumerate(sequences):
        assert before[i][:prompt_length] == [0.0] * prompt_length
        torch.testing.assert_close(
            torch.tensor(before[i][prompt_length:]), expected[i][prompt_length - 1 :], atol=1e-5, rtol=1e-5
        )

    def error(values):
        return sum((value - 1) ** 2 for i, (_, length) in enumerate(sequences) for value in values[i][length:])

    assert error(after) < 0.8 * error(before)
    assert all(result[2] == pytest.approx(norm, rel=1e-4) for result in results)


def entropy_gradient(rank, folder):
    """Mean entropy before and after ten steps that maximise it."""
    engine = make_engine(folder)
    engine.use_optimizer(OptimizerConfig())
    samples = [sample([5, 6, 7, 8, 9])]
    for s in samples:
        s.old_logprobs = s.advantages = torch.zeros(5)
    loss = partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="token_mean", entropy_coefficient=1.0)

    def entropy():
        return float(engine.logprobs(samples, 1.0)[0][1].sum()) / 4

    before = entropy()
    loss_values = [engine.train_step(samples, loss, 1e-2, entropy_gradient=True)["loss"] for _ in range(10)]
    return before, loss_values, entropy()


def test_an_entropy_bonus_reaches_the_weights(folder):
    ((before, losses, after),) = run_ranks(entropy_gradient, 1, folder)
    assert losses[0] == pytest.approx(-before, rel=1e-5) and after > before + 0.05


def decayed(rank, folder):
    """Weights after a step with a zero loss and a large weight decay."""
    engine = make_engine(folder)
    before = {name: tensor.clone() for name, tensor in engine.hf_tensors()}
    engine.use_optimizer(OptimizerConfig(weight_decay=0.5))
    engine.train_step([sample([5, 6, 7])], lambda logprobs, batch: (logprobs.sum() * 0.0, {}), 0.1, 1.0)
    after = dict(engine.hf_tensors())
    return {name: float((after[name] / before[name]).mean()) for name in after}


def test_weight_decay_acts_on_matrices_alone(folder):
    (ratios,) = run_ranks(decayed, 1, folder)
    for name, ratio in ratios.items():
        is_matrix = "proj.weight" in name or "embed" in name
        assert ratio == pytest.approx(0.95 if is_matrix else 1.0, abs=1e-5), name


def clipped(rank, folder, clip_grad):
    engine = make_engine(folder)
    engine.use_optimizer(OptimizerConfig(clip_grad=clip_grad))
    result = engine.train_step([sample([5, 6, 7, 8])], sft_loss, 1e-3)
    squares = sum(float((x.astype("float64") ** 2).sum()) for x in full_gradients(engine).values())
    return result["grad_norm"], squares**0.5


@pytest.mark.parametrize("world_size, layout", [(1, {}), (2, {}), (2, {"tensor_parallel": 2})])
def test_gradients_are_clipped_by_their_global_norm(folder, world_size, layout):
    loose = run_ranks(clipped, world_size, folder, 1e9, **layout)
    tight = run_ranks(clipped, world_size, folder, 0.25, **layout)
    norm = loose[0][0]
    assert norm > 1 and loose[0][1] == pytest.approx(norm, rel=1e-5)
    assert [n for n, _ in tight] == pytest.approx([norm] * world_size, rel=1e-6)  # as it was before the clip
    assert tight[0][1] == pytest.approx(0.25, rel=1e-4)
