"""Advantages from rewards against numbers worked by hand, and against loops in float64 at random inputs."""

import random
from statistics import mean, stdev

import pytest
import torch

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.advantages import distillation
from megarl.errors import RunError
from megarl.sample import Prompt, Sample

grpo = ADVANTAGES["grpo"]
IN_GROUPS = ["dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gdpo"]
RELATIVE = [*(("grpo", {"normalize_by_std": by_std}) for by_std in (True, False)), *((name, {}) for name in IN_GROUPS)]


def sample_with(reward, group_id=0, response_length=2):
    prompt = Prompt(messages=[], token_ids=[1, 1, 1])
    return Sample.from_response(prompt, [5] * response_length, group_id=group_id, index=0, reward=reward)


def advantages_of(rewards, normalize_by_std):
    samples = [sample_with(reward) for reward in rewards]
    grpo(samples, normalize_by_std)
    return [sample.advantages[-1].item() for sample in samples]


def test_reference_values_with_the_unbiased_std():
    assert advantages_of([1, 1, 1, 0], True) == [0.5, 0.5, 0.5, -1.5]


def test_reference_values_without_std():
    assert advantages_of([1, 1, 1, 0], False) == [0.25, 0.25, 0.25, -0.75]


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 4, [0.1] * 8, [0.1] * 3, [-1e30] * 5, [0.7]])
def test_equal_rewards_and_single_samples_give_exactly_0(rewards, normalize_by_std):
    """O06."""
    assert all(advantage == 0 for advantage in advantages_of(rewards, normalize_by_std))


def test_a_ragged_single_sample_gets_0_beside_a_full_group():
    samples = [sample_with(r, group_id=3) for r in (1, 1, 1, 0)] + [sample_with(1.0, group_id=7)]
    grpo(samples, True)
    assert [s.advantages[-1].item() for s in samples] == [0.5, 0.5, 0.5, -1.5, 0.0]


def test_groups_are_told_by_their_id_and_not_by_their_place():
    rewards_and_groups = [(1, 0), (5, 1), (0, 0), (9, 1)]
    samples = [sample_with(reward, group_id) for reward, group_id in rewards_and_groups]
    grpo(samples, False)
    assert [s.advantages[-1].item() for s in samples] == [0.5, -2.0, -0.5, 2.0]


def test_every_trained_token_has_the_advantage_and_no_other_token():
    samples = [sample_with(1.0, response_length=3), sample_with(0.0, response_length=1)]
    samples[0].loss_mask[4] = False  # a token put in by a tool, say
    grpo(samples, False)
    assert samples[0].advantages.tolist() == [0, 0, 0, 0.5, 0, 0.5]
    assert samples[1].advantages.tolist() == [0, 0, 0, -0.5]
    assert samples[0].advantages.dtype == torch.float32


def test_truncated_and_completed_responses_are_masked_by_length():
    truncated, completed = sample_with(1.0, response_length=3), sample_with(0.0, response_length=3)
    completed.token_ids[-1] = 2  # end of turn: trained like any other token
    grpo([truncated, completed], True)
    assert (truncated.loss_mask.sum(), completed.loss_mask.sum()) == (3, 3)
    assert (truncated.advantages != 0).tolist() == truncated.loss_mask.tolist()
    assert (completed.advantages != 0).tolist() == completed.loss_mask.tolist()


def test_a_small_spread_on_a_large_offset_is_not_lost():
    assert advantages_of([1e6 + 1, 1e6 + 1, 1e6 + 1, 1e6], True) == pytest.approx([0.5, 0.5, 0.5, -1.5], abs=1e-6)


def test_a_sample_without_reward_is_our_mistake():
    with pytest.raises(AssertionError, match="no reward"):
        grpo([sample_with(None)], True)


def filled(name, samples, **options):
    ADVANTAGES[name](samples, **options)
    return [sample.advantages[-1].item() for sample in samples]


def with_parts(group_id=0, **parts):
    sample = sample_with(sum(parts.values()), group_id)
    sample.reward_parts = parts
    return sample


def test_dr_grpo_is_grpo_without_std():
    assert filled("dr_grpo", [sample_with(r) for r in (1, 1, 1, 0)]) == [0.25, 0.25, 0.25, -0.75]


def test_rloo_compares_with_the_mean_of_the_others():
    assert filled("rloo", [sample_with(r) for r in (1, 1, 1, 0)]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])
    assert filled("rloo", [sample_with(r) for r in (3, 1)]) == [2, -2]


def test_opo_weighs_the_baseline_by_trained_tokens():
    samples = [sample_with(1.0, response_length=4), sample_with(0.0, response_length=1)]
    samples[0].loss_mask[4] = False  # three trained tokens: b = 3 / 4
    assert filled("opo", samples) == [0.25, -0.75]
    assert samples[0].advantages.tolist() == [0, 0, 0, 0.25, 0, 0.25, 0.25]


def test_opo_without_trained_tokens_has_no_nan():
    samples = [sample_with(1.0, response_length=0), sample_with(0.0, response_length=0)]
    assert filled("opo", samples) == [0, 0]


def test_reinforce_plus_plus_whitens_over_tokens():
    samples = [sample_with(1.0, 0, response_length=1), sample_with(0.0, 1, response_length=3)]
    ADVANTAGES["reinforce_plus_plus"](samples)  # tokens 1 0 0 0: mean 1/4, std 1/2
    assert samples[0].advantages.tolist() == [0, 0, 0, 1.5]
    assert samples[1].advantages.tolist() == [0, 0, 0, -0.5, -0.5, -0.5]


def test_reinforce_plus_plus_sums_penalties_from_the_token_to_the_end():
    sample = sample_with(7.0, response_length=3)  # 7 - (3, 2, 1): mean 5, std 1
    ADVANTAGES["reinforce_plus_plus"]([sample], [torch.tensor([9.0, 9.0, 9.0, 1.0, 1.0, 1.0])])
    assert sample.advantages.tolist() == [0, 0, 0, -1, 0, 1]


def test_reinforce_plus_plus_baseline_divides_by_the_std_of_the_batch():
    samples = [sample_with(r, 0) for r in (1, 1, 1, 0)] + [sample_with(5.0, 1) for _ in range(9)]
    # centered: 1/4 1/4 1/4 -3/4 and nine times 0, so std = sqrt(0.75 / 12) = 1/4
    assert filled("reinforce_plus_plus_baseline", samples) == [1, 1, 1, -3] + [0] * 9


def test_gdpo_normalizes_each_part_before_it_sums():
    parts = [(1, 1), (1, 0), (1, 0), (0, 0)]  # normalized: (.5, 1.5) (.5, -.5) (.5, -.5) (-1.5, -.5)
    samples = [with_parts(correct=c, short=s) for c, s in parts]
    assert filled("gdpo", samples) == pytest.approx([1.5**0.5, 0, 0, -(1.5**0.5)])  # sums 2 0 0 -2, std sqrt(8 / 3)
    weighted = filled("gdpo", samples, reward_weights={"correct": 3.0, "short": 1.0, "other": 5.0})
    assert weighted == pytest.approx([s / 12**0.5 for s in (3, 1, 1, -5)])


def test_gdpo_leaves_parts_without_a_weight_out():
    samples = [with_parts(correct=c) for c in (1, 1, 0, 0)]
    expected = filled("gdpo", samples)
    for sample, length in zip(samples[1:], (5.0, 7.0, 9.0)):  # the first one has no such part
        sample.reward_parts["correct/length"] = length
    assert filled("gdpo", samples, reward_weights={"correct": 2.0}) == expected


def test_gdpo_parts_that_cancel_give_exactly_0():
    samples = [with_parts(correct=c, wrong=1 - c) for c in (0.1, 0.2, 0.7)]
    others = [with_parts(1, correct=c, wrong=1 - c) for c in (1, 0, 0, 0, 1)]
    assert filled("gdpo", samples + others) == [0] * 8


def test_gdpo_names_the_sample_whose_parts_are_wrong():
    with pytest.raises(RunError, match=r"group 0 has reward parts \['correct'\].*\['correct', 'short'\]"):
        filled("gdpo", [with_parts(correct=1, short=0), with_parts(correct=1)])
    with pytest.raises(RunError, match="at least one"):
        filled("gdpo", [sample_with(1.0)])
    with pytest.raises(RunError, match=r"has reward parts \['short'\]: wanted at least one of \['shrot'\]"):
        filled("gdpo", [with_parts(short=1)], reward_weights={"shrot": 1.0})
    with pytest.raises(RunError, match="finite"):
        filled("gdpo", [with_parts(short=float("nan"))])


@pytest.mark.parametrize("name", [*IN_GROUPS, "reinforce_plus_plus"])
@pytest.mark.parametrize("reward, size", [(1.0, 4), (0.0, 4), (0.1, 8), (0.1, 3), (-1e30, 5), (0.7, 1)])
def test_a_batch_of_equal_rewards_gives_exactly_0_everywhere(name, reward, size):
    """O06."""
    samples = [with_parts(part=reward) for _ in range(size)]
    assert filled(name, samples) == [0] * size


@pytest.mark.parametrize("name", IN_GROUPS)
def test_singletons_and_equal_groups_give_exactly_0_beside_others(name):
    samples = [with_parts(3, part=r) for r in (1, 0.5, 0.3, 0)] + [with_parts(7, part=1.0)]
    samples += [with_parts(8, part=0.1) for _ in range(3)]
    advantages = filled(name, samples)
    assert any(advantages[:4]) and advantages[4:] == [0, 0, 0, 0]


@pytest.mark.parametrize("name, options", RELATIVE)
def test_groups_of_one_give_exactly_0_whatever_their_rewards(name, options):
    """O07: a batch of such groups, and one that kept 1 of its 4 samples beside whole ones."""
    assert filled(name, [with_parts(0, part=1.0), with_parts(1, part=0.0)], **options) == [0, 0]
    ragged = [with_parts(group, part=r) for group in (0, 2) for r in (1, 0, 0, 1)] + [with_parts(1, part=1.0)]
    advantages = filled(name, ragged, **options)
    assert all(advantages[:8]) and advantages[8] == 0


def test_distillation_compares_teacher_and_policy_at_each_trained_token_and_ignores_rewards():
    sample = sample_with(None, response_length=3)
    sample.old_logprobs = torch.tensor([float("nan")] * 3 + [-1.0, -2.0, -0.5])
    sample.teacher_logprobs = torch.tensor([float("nan")] * 3 + [-0.5, -2.0, -100.0])
    distillation([sample])
    assert sample.advantages.tolist() == [0, 0, 0, 0.5, 0, -99.5]
    assert sample.advantages.dtype == torch.float32
    sample.teacher_logprobs = None
    with pytest.raises(AssertionError, match="no teacher_logprobs"):
        distillation([sample])


def test_distillation_follows_the_gradient_of_the_divergence_from_policy_to_teacher():
    """Over all three tokens of a vocabulary, each with its probability under the policy."""
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    logprobs, teacher = logits.log_softmax(0), torch.tensor([0.6, 0.3, 0.1]).log()
    sample = sample_with(None, response_length=3)
    sample.old_logprobs = torch.cat([torch.zeros(3), logprobs.detach()])
    sample.teacher_logprobs = torch.cat([torch.zeros(3), teacher])
    distillation([sample])
    policy_gradient = -(logprobs.detach().exp() * sample.advantages[3:] * logprobs).sum()
    divergence = (logprobs.exp() * (logprobs - teacher)).sum()
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (policy_gradient, divergence)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].norm() > 0.1


def grpo_loop(sample, group, batch):
    rewards = [s.reward for s in group]
    return (sample.reward - mean(rewards)) / stdev(rewards)


def dr_grpo_loop(sample, group, batch):
    return sample.reward - mean(s.reward for s in group)


def rloo_loop(sample, group, batch):
    return sample.reward - mean(s.reward for s in group if s is not sample)


def opo_loop(sample, group, batch):
    lengths = [s.response_length for s in group]
    return sample.reward - sum(n * s.reward for n, s in zip(lengths, group)) / sum(lengths)


def reinforce_plus_plus_loop(sample, group, batch):
    tokens = [s.reward for s in batch for _ in range(s.response_length)]
    return (sample.reward - mean(tokens)) / stdev(tokens)


def reinforce_plus_plus_baseline_loop(sample, group, batch):
    centered = {id(s): s.reward - mean(o.reward for o in batch if o.group_id == s.group_id) for s in batch}
    return (centered[id(sample)] - mean(centered.values())) / stdev(centered.values())


def gdpo_loop(sample, group, batch):
    def summed(s):
        parts = [[o.reward_parts[k] for o in batch if o.group_id == s.group_id] for k in s.reward_parts]
        return sum((r - mean(part)) / stdev(part) for r, part in zip(s.reward_parts.values(), parts))

    sums = [summed(s) for s in batch]
    return (summed(sample) - mean(sums)) / stdev(sums)


LOOPS = {
    "grpo": grpo_loop,
    "dr_grpo": dr_grpo_loop,
    "rloo": rloo_loop,
    "opo": opo_loop,
    "reinforce_plus_plus": reinforce_plus_plus_loop,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_loop,
    "gdpo": gdpo_loop,
}


@pytest.mark.parametrize("name", LOOPS)
def test_each_equals_a_loop_over_its_formula_at_random_inputs(name):
    draw = random.Random(0)
    batch = []
    for place in range(40):  # groups of 10, whose samples are not neighbours
        sample = sample_with(draw.gauss(3, 2), group_id=place % 4, response_length=draw.randint(1, 9))
        sample.reward_parts = {"a": draw.gauss(0, 1), "b": draw.gauss(-5, 7), "c": draw.random()}
        sample.advantages = torch.full((len(sample.token_ids),), float("nan"))
        batch.append(sample)
    ADVANTAGES[name](batch, **{"normalize_by_std": True} if name == "grpo" else {})
    for sample in batch:
        expected = LOOPS[name](sample, [s for s in batch if s.group_id == sample.group_id], batch)
        assert sample.advantages.tolist() == pytest.approx([0] * 3 + [expected] * sample.response_length, rel=1e-6)
        assert sample.advantages.dtype == torch.float32


def test_reinforce_plus_plus_with_penalties_equals_a_loop_and_never_sees_masked_ones():
    draw = random.Random(1)
    batch = [sample_with(draw.gauss(0, 1), response_length=draw.randint(1, 9)) for _ in range(6)]
    batch[0].loss_mask[3] = False
    penalties = [torch.tensor([draw.gauss(0, 1) for _ in sample.token_ids]) for sample in batch]
    to_go = []  # one number for each trained token
    for sample, penalty in zip(batch, penalties):
        penalty[~sample.loss_mask] = float("nan")
        values = [p for p, trained in zip(penalty.tolist(), sample.loss_mask.tolist()) if trained]
        to_go += [sample.reward - sum(values[t:]) for t in range(len(values))]
    ADVANTAGES["reinforce_plus_plus"](batch, penalties)
    trained = [a for s in batch for a in s.advantages[s.loss_mask].tolist()]
    assert trained == pytest.approx([(a - mean(to_go)) / stdev(to_go) for a in to_go], rel=1e-5, abs=1e-6)
    assert all(not s.advantages[~s.loss_mask].any() for s in batch)
