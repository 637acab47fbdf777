"""A reward model, PPO whose critic starts from it, pairs of PPO's samples, DPO on them: each from what came before."""

import json

import pytest
from end_to_end import ROOT, Run, run_tool, steps


def lines(run_path) -> list[dict]:
    return [json.loads(line) for line in (run_path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_reward_model_ppo_pairs_and_dpo_follow_one_another(tmp_path):
    runs = tmp_path / "runs"

    def train(name: str, *overrides: str) -> None:
        with Run(tmp_path, str(ROOT / f"configs/quickstart_{name}.yaml"), *overrides) as run:
            assert run.wait(400) == 0, run.output

    train("reward_model", "trainer.steps=120", "roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=2")
    held_out = [m["validation/reward_model/accuracy"] for m in lines(runs / "quickstart_reward_model") if len(m) < 8]
    assert len(held_out) == 3 and held_out[-1] > 0.65 > held_out[0] + 0.1, held_out
    run_tool("convert_ckpt.py", "--to-hf", "runs/quickstart_reward_model", "runs/reward_model_hf", folder=tmp_path)

    train("ppo", "trainer.steps=4", "algorithm.critic_warmup_steps=1", "data.validation=null", "warm_start.steps=200",
          "algorithm.epochs=2", "roles.critic={path: runs/reward_model_hf, cpus_per_rank: 0.25}",
          "algorithm.reward={last_integer: 1.0, model: 0.1}",
          "roles.reward_model={path: runs/reward_model_hf, cpus_per_rank: 0.25}")  # fmt: skip
    found = steps(runs / "quickstart_ppo")
    for m in found:
        parts = m["reward/last_integer_mean"] + 0.1 * m["reward/model_mean"]
        assert abs(m["reward/model_mean"]) > 0.02 and abs(m["reward/mean"] - parts) < 1e-6
    assert abs(found[0]["critic/value_mean"]) > 0.02  # a fresh head says 0
    assert "grad_norm" not in found[0] and all(m["grad_norm"] > 0 for m in found[1:])
    assert all(m["critic/grad_norm"] > 0 and m["rollout/logprob_diff_mean"] < 1e-4 for m in found)
    assert found[1]["kl/ref"] == 0 < found[2]["kl/ref"]  # in the first step only the critic was trained

    run_tool("make_preferences.py", "runs/quickstart_ppo", "runs/pairs.jsonl", folder=tmp_path)
    run_tool("convert_ckpt.py", "--to-hf", "runs/quickstart_ppo", "runs/quickstart_ppo_hf", folder=tmp_path)
    train("dpo", "trainer.steps=20", "algorithm.prompts_per_step=16", "algorithm.mini_batch_size=16",
          "roles.actor.optimizer.learning_rate=5e-4")  # fmt: skip
    margins = [m["dpo/margin"] for m in lines(runs / "quickstart_dpo")]
    assert margins[0] < 0.02 < 0.1 < sum(margins[-5:]) / 5, margins


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_served_reward_model_gives_rewards(tmp_path, placement):
    def train(*arguments: str) -> None:
        with Run(tmp_path, *arguments) as run:
            assert run.wait(400) == 0, run.output

    train(str(ROOT / "configs/quickstart_reward_model.yaml"), "trainer.steps=40")
    run_tool("convert_ckpt.py", "--to-hf", "runs/quickstart_reward_model", "runs/reward_model_hf", folder=tmp_path)
    train(str(ROOT / "configs/quickstart.yaml"), "trainer.steps=2", "warm_start.steps=40", "data.validation=null",
          f"placement={placement}", "algorithm.reward={last_integer: 1.0, model: 0.1}", "rollout.cpus_per_server=0.5",
          "roles.reward_server={path: runs/reward_model_hf, cpus_per_server: 0.5}")  # fmt: skip
    for m in steps(tmp_path / "runs/quickstart"):
        assert abs(m["reward/model_mean"]) > 0.02
        assert abs(m["reward/mean"] - m["reward/last_integer_mean"] - 0.1 * m["reward/model_mean"]) < 1e-6
