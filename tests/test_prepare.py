import pytest
import torch

from megarl.algorithms.kl import k1
from megarl.config import Config
from megarl.prepare import keywords_of, prepare
from megarl.sample import Prompt, Sample, Status


def config(**algorithm) -> Config:
    settings = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": algorithm}
    return Config.model_validate(settings | {"rollout": {"sampling": {"max_new_tokens": 10}}})


def samples(rewards=(1.0, 0.0, 1.0, 1.0), lengths=(2, 3, 8, 10)) -> list[Sample]:
    """Two groups of two; the last one is cut. Log-probs fall by 0.1 from token to token, the reference's stay."""
    made = []
    for i, (reward, length) in enumerate(zip(rewards, lengths)):
        status = Status.TRUNCATED if length == 10 else Status.COMPLETED
        fields = {"group_id": i // 2, "index": i, "reward": reward, "status": status}
        sample = Sample.from_response(Prompt([], [1, 2]), [3] * length, **fields)
        trained = sample.loss_mask.float()
        sample.old_logprobs = -0.1 * trained.cumsum(0)
        sample.rollout_logprobs = sample.old_logprobs - 0.01 * trained
        sample.ref_logprobs = -0.5 * trained
        sample.values = 0.25 * trained
        made.append(sample)
    return made


def trained(sample: Sample, name: str) -> torch.Tensor:
    return getattr(sample, name)[sample.loss_mask]


def test_a_group_relative_estimator_takes_the_kl_as_one_sum():
    made = samples()
    expected = [s.reward - 0.1 * float(k1(trained(s, "old_logprobs"), trained(s, "ref_logprobs")).sum()) for s in made]
    prepare(made, config(name="rloo", kl_coefficient=0.1), 0.1)
    assert [s.reward for s in made] == pytest.approx(expected)
    assert trained(made[0], "advantages").tolist() == pytest.approx([expected[0] - expected[1]] * 2)


def test_an_estimator_with_an_advantage_for_each_token_takes_the_kl_token_by_token():
    made = samples()
    metrics = prepare(made, config(name="ppo", whiten_advantages=False, gae={"lam": 1.0}, kl_coefficient=0.1), 0.2)
    assert [s.reward for s in made] == [1.0, 0.0, 1.0, 1.0]
    penalties = 0.2 * (trained(made[1], "old_logprobs") - trained(made[1], "ref_logprobs"))
    to_go = -penalties.flip(0).cumsum(0).flip(0)  # reward 0
    assert trained(made[1], "advantages").tolist() == pytest.approx((to_go - 0.25).tolist())
    assert trained(made[1], "returns").tolist() == pytest.approx(to_go.tolist())
    assert metrics["critic/value_mean"] == 0.25 and metrics["critic/explained_variance"] == pytest.approx(0.0)


def test_a_coefficient_that_was_adapted_is_the_one_that_counts_and_the_loss_has_its_own():
    in_loss, without = samples(), samples()
    prepare(in_loss, config(name="grpo", kl_coefficient=0.1), 0.5)
    prepare(without, config(name="grpo"), 0.0)
    assert [s.reward for s in in_loss] == [1.0, 0.0, 1.0, 1.0]
    assert all(torch.equal(a.advantages, b.advantages) for a, b in zip(in_loss, without))


def test_overlong_responses_lose_reward_and_with_the_filter_their_training():
    made = samples()
    metrics = prepare(made, config(name="dapo", overlong={"buffer_tokens": 4, "penalty": 0.5, "filter": True}), 0.0)
    assert [s.reward for s in made] == [1.0, 0.0, 0.75, 0.5]
    assert metrics["overlong/penalty_mean"] == pytest.approx(-0.75 / 4) and metrics["overlong/filtered_ratio"] == 0.25
    assert not made[3].loss_mask.any() and not made[3].advantages.any()
    assert trained(made[2], "advantages").tolist() == pytest.approx([0.5**0.5] * 8)  # against the 0.5 of the cut one


def test_rewards_are_whitened_after_their_penalties_and_advantages_last():
    made = samples()
    algorithm = {"overlong": {"buffer_tokens": 4}, "whiten_rewards": True, "whiten_advantages": True}
    prepare(made, config(name="dr_grpo", **algorithm), 0.0)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0])
    assert [s.reward for s in made] == pytest.approx(((rewards - rewards.mean()) / rewards.std()).tolist())
    every = torch.cat([trained(s, "advantages") for s in made])
    assert every.mean().item() == pytest.approx(0, abs=1e-6) and every.std().item() == pytest.approx(1)


def test_the_correction_fills_the_weights_and_its_metrics():
    made = samples()
    metrics = prepare(made, config(name="grpo", off_policy={"kind": "token_tis"}), 0.0)
    assert trained(made[0], "weights").tolist() == pytest.approx([2.718281828**0.01] * 2)
    assert metrics["off_policy/clipped"] == 0 and metrics["off_policy/kl_k1"] == pytest.approx(-0.01, rel=1e-3)


def test_parts_with_weights_reach_gdpo():
    made = samples()
    for sample, right, ended in zip(made, (1.0, 0.0, 1.0, 1.0), (0.0, 1.0, 1.0, 0.0)):
        sample.reward_parts = {"last_integer": right, "completed": ended}
    prepare(made, config(name="gdpo", reward={"last_integer": 3.0, "completed": 1.0}), 0.0)
    signs = [trained(s, "advantages")[0].sign().item() for s in made]
    assert signs == [1, -1, 1, -1]  # the first group by its heavier part, the second by the one that differs


def test_distillation_looks_at_the_teacher_alone():
    made = samples()
    for sample in made:
        sample.reward, sample.teacher_logprobs = None, -0.3 * sample.loss_mask.float()
    metrics = prepare(made, config(name="distillation"), 0.0)
    assert trained(made[0], "advantages").tolist() == pytest.approx([-0.2, -0.1])
    every = torch.cat([trained(s, "old_logprobs") + 0.3 for s in made])
    assert metrics["distillation/reverse_kl"] == pytest.approx(every.mean().item())


def test_only_the_keys_that_a_function_has_are_handed_to_it():
    def function(samples, gamma, lam, unknown=3):
        pass

    algorithm = config(name="ppo").algorithm
    assert keywords_of(function, algorithm, algorithm.gae) == {"gamma": 1.0, "lam": 0.95}
