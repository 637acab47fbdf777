"""Loss and gradients are those of one large batch, however it is split: micro-batches, ranks, packing order."""

import random
from functools import partial

import pytest
import torch
from gradients import full_gradients
from hf_models import write_hf_model
from ranks import make_engine, run_ranks

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.preference_losses import dpo_loss
from megarl.config import ModelConfig, OptimizerConfig
from megarl.sample import Prompt, Sample

VOCAB_SIZE = 101
LAYOUTS = {  # number of ranks, RoleConfig
    "one rank": (1, {}),
    "DP 2": (2, {}),
    "DP 3": (3, {"balance": "tokens"}),
    "TP 2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "PP 2": (2, {"pipeline_parallel": 2}),
    "PP 2 VPP 2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "DP 2 TP 2": (4, {"tensor_parallel": 2}),
}
SEEDS = {"one rank": 4, "DP 2": 4, "DP 3": 2, "TP 2 SP": 2, "PP 2": 2, "PP 2 VPP 2": 2, "DP 2 TP 2": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_hf_model(tmp_path_factory.mktemp("model"), "qwen2", True, VOCAB_SIZE)


def random_samples(seed: int) -> list[Sample]:
    """Of 1 to 40 tokens, some of them not trained at all, with everything that a policy loss reads."""
    generator = random.Random(seed)
    samples = []
    for index in range(generator.randint(5, 12)):
        length = generator.choice([2, 3, generator.randint(4, 40)])
        prompt_length = generator.randint(1, length - 1)
        ids = [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        sample = Sample.from_response(Prompt([], ids[:prompt_length]), ids[prompt_length:], group_id=0, index=index)
        sample.loss_mask &= generator.random() > 0.15
        noise = torch.Generator().manual_seed(1000 * seed + index)
        sample.old_logprobs = -4.6 + 0.3 * torch.randn(length, generator=noise)
        sample.ref_logprobs = -4.6 + 0.3 * torch.randn(length, generator=noise)
        sample.advantages = torch.randn(length, generator=noise)
        samples.append(sample)
    return samples


def loss_of(aggregation):
    return partial(policy_loss, clip_low=0.2, clip_high=0.3, loss_aggregation=aggregation, kl_coefficient=0.1)


def step(rank, folder, samples, aggregation, max_tokens, role):
    engine = make_engine(folder, max_tokens=max_tokens, **role)
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    result = engine.train_step(samples, loss_of(aggregation), 1e-3)
    return result.get("loss", 0.0), full_gradients(engine)


def merged(results):
    return sum(loss for loss, _ in results), {name: x for _, gradients in results for name, x in gradients.items()}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_split_gives_the_loss_and_gradients_of_one_large_batch(folder, layout, aggregation):
    world_size, role = LAYOUTS[layout]
    for seed in range(SEEDS[layout]):
        samples = random_samples(seed)
        large = merged(run_ranks(step, 1, folder, samples, aggregation, 10_000, {}))
        order = random.Random(seed + 100)
        shuffled = order.sample(samples, len(samples))
        max_tokens = order.choice([1, 25, 60, 200])
        split = merged(run_ranks(step, world_size, folder, shuffled, aggregation, max_tokens, role, **role))
        assert split[0] == pytest.approx(large[0], abs=1e-6, rel=1e-6)
        assert split[1].keys() == large[1].keys()
        largest = max(abs(gradient).max() for gradient in large[1].values())
        assert largest > 1e-3
        for name, gradient in large[1].items():
            error = abs(split[1][name] - gradient).max()
            assert error <= 1e-6 * max(1.0, largest), f"{name}: {error} with {max_tokens} tokens, seed {seed}"


def unpacked_loss_and_gradients(folder, samples, aggregation):
    """The same by transformers, one sequence at a time, from the formula."""
    from transformers import AutoModelForCausalLM

    from megarl.data.packing import count_denominators, pack

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    denominators = count_denominators(samples)
    total = 0.0
    for sample in samples:
        logits = model(sample.token_ids[None]).logits[0].log_softmax(-1)
        logprobs = torch.cat([torch.zeros(1), logits[torch.arange(len(sample.token_ids) - 1), sample.token_ids[1:]]])
        loss, _ = loss_of(aggregation)(logprobs, pack([sample], *denominators, torch.device("cpu")))
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_packed_sequences_do_not_see_each_other(folder, aggregation):
    samples = random_samples(7)
    expected_loss, expected = unpacked_loss_and_gradients(folder, samples, aggregation)
    loss, gradients = merged(run_ranks(step, 1, folder, samples, aggregation, 10_000, {}))
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            torch.tensor(gradients[name]), torch.tensor(gradient), atol=1e-6, rtol=1e-4, msg=name
        )


def random_pairs(seed: int, num_pairs: int) -> list[Sample]:
    """Samples whose responses are trained whole."""
    samples = random_samples(seed)[: 2 * num_pairs]
    for sample in samples:
        sample.loss_mask[sample.prompt_length :] = True
    return samples


def pair_steps(rank, folder, batches, max_tokens, role):
    """[(sums of train_step, of evaluate and of evaluate on an engine that cannot train, gradients) of each batch], the
    weights staying as they are."""
    from megarl.engine.engine import Engine

    engine = make_engine(folder, max_tokens=max_tokens, **role)
    engine.use_optimizer(OptimizerConfig(clip_grad=1e9))
    frozen = Engine(ModelConfig(path=str(folder), dtype="float32"), engine.role, trainable=False)
    loss = partial(dpo_loss, beta=0.5)
    results = []
    for samples in batches:
        trained = engine.train_step(samples, loss, learning_rate=0.0, pairs=True)
        gradients = full_gradients(engine)
        evaluated = [e.evaluate(samples, loss, pairs=True) for e in (engine, frozen)]
        results.append((trained, *evaluated, gradients))
    return results


def test_pairs_give_the_loss_and_gradients_of_one_large_batch_however_they_are_split(folder):
    """Four pairs, of which some fill a micro-batch alone, and one pair for two replicas."""
    batches = [random_pairs(8, 4), random_pairs(5, 1)]
    assert [len(samples) for samples in batches] == [8, 2]
    (large,) = run_ranks(pair_steps, 1, folder, batches, 10_000, {})
    role = {"tensor_parallel": 2, "sequence_parallel": True}
    split = run_ranks(pair_steps, 4, folder, batches, 40, role, **role)
    for (trained, *evaluated, gradients), *ranks in zip(large, *split, strict=True):
        metrics = trained.keys() - {"grad_norm", "skipped"}
        assert metrics == evaluated[0].keys() >= {"loss", "margin", "nonfinite_logprobs"}
        assert evaluated[0] == evaluated[1] and abs(trained["margin"]) > 0.01
        for key in metrics:
            sums = [sum(result[which].get(key, 0.0) for result in ranks) for which in range(3)]
            assert [evaluated[0][key], *sums] == pytest.approx([trained[key]] * 4, abs=1e-5, rel=1e-5), key
        assert all(result[0]["grad_norm"] == pytest.approx(trained["grad_norm"], rel=1e-5) for result in ranks)
        split_gradients = {name: x for result in ranks for name, x in result[3].items()}
        assert split_gradients.keys() == gradients.keys()
        largest = max(abs(gradient).max() for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert abs(split_gradients[name] - gradient).max() <= 1e-6 * max(1.0, largest), name
