"""The toy task improves under every algorithm of the README; parts that no preset has are among them."""

import pytest
from end_to_end import ROOT, Run, run_tool, steps

NUM_STEPS = 40
PPO = ("algorithm.name=ppo", "rollout.cpus_per_server=0.5", "roles.critic.optimizer.learning_rate=1e-3", "algorithm.critic_warmup_steps=3")
RUNS = {
    "grpo": (),
    "rloo": ("algorithm.name=rloo", "algorithm.kl_coefficient=0.001"),
    "reinforce++": ("algorithm.name=reinforce_plus_plus", "algorithm.kl_coefficient=0.001"),
    "ppo": (*PPO, "algorithm.kl_coefficient=0.001", "algorithm.kl_target=0.1", "algorithm.kl_horizon=2000"),
    "gspo": ("algorithm.name=gspo", "algorithm.mini_batch_size=64", "algorithm.clip_low=3e-3", "algorithm.clip_high=4e-3"),
    "cispo": ("algorithm.name=cispo", "algorithm.mini_batch_size=64"),
    "dapo": ("algorithm.name=dapo", "algorithm.overlong.buffer_tokens=1", "algorithm.overlong.filter=true"),
    "dr_grpo, server's log-probs": ("algorithm.name=dr_grpo", "algorithm.old_logprobs=rollout", "algorithm.epochs=2"),
    "opo, dual_clip": ("algorithm.name=opo", "algorithm.policy_loss=dual_clip"),
    "reinforce++ baseline, KL, moving reference": ("algorithm.name=reinforce_plus_plus_baseline",
                                                   "algorithm.kl_coefficient=0.001",
                                                   "roles.reference={refresh_every: 2, ema_decay: 0.9}"),
    "gdpo": ("algorithm.name=gdpo", "algorithm.reward={last_integer: 1.0, completed: 0.2}"),
    "sapo, off-policy": ("algorithm.name=sapo", "algorithm.off_policy={kind: token_tis}"),
    "gae, length-adaptive": (*PPO, "algorithm.gae={lam: null, length_adaptive_alpha: 0.5, returns_lam: 1.0}"),
}  # fmt: skip


@pytest.mark.soak
@pytest.mark.parametrize("parts", RUNS)
def test_mean_reward_rises(tmp_path, parts):
    with Run(tmp_path, str(ROOT / "configs/quickstart.yaml"), "name=test", f"trainer.steps={NUM_STEPS}", "data.validation=null",
             *RUNS[parts]) as run:  # fmt: skip
        assert run.wait(600) == 0, run.output
    found = steps(tmp_path / "runs/test")
    rewards = [m["reward/mean"] for m in found]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1, rewards
    if "off-policy" in parts:
        assert all(abs(m["off_policy/ess"] - 1) < 1e-3 and m["off_policy/masked"] == 0 for m in found)
    if parts == "dapo":
        assert any(m["dynamic_sampling/rounds"] > 1 for m in found) and any(m["dynamic_sampling/from_last_step"] for m in found)
    if parts == "ppo":
        assert len({m["kl/coefficient"] for m in found}) > NUM_STEPS / 2
        assert max(m["critic/explained_variance"] for m in found) > 0.2
    if "moving reference" in parts:
        assert found[1]["kl/ref"] > 0


@pytest.mark.soak
def test_a_student_reaches_its_teacher(tmp_path):
    configs = ROOT / "configs"
    with Run(tmp_path, str(configs / "quickstart_ppo.yaml"), "trainer.steps=40") as run:
        assert run.wait(600) == 0, run.output
    run_tool("convert_ckpt.py", "--to-hf", "runs/quickstart_ppo", "runs/quickstart_ppo_hf", folder=tmp_path)
    with Run(tmp_path, str(configs / "quickstart_distillation.yaml"), "trainer.steps=40") as run:
        assert run.wait(600) == 0, run.output
    found = steps(tmp_path / "runs/quickstart_distillation")
    distances, rewards = ([m[key] for m in found] for key in ("distillation/reverse_kl", "reward/mean"))
    assert distances[0] > 0.1 and abs(sum(distances[-5:]) / 5) < 0.03, distances
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 2, rewards
