"""The toy task improves under every algorithm of the README; parts that no preset has are among them."""

import sys

import pytest
from end_to_end import ROOT, Run, run_tool, steps

sys.path.insert(0, str(ROOT / "benchmarks"))
from algorithms import RUNS

NUM_STEPS = 40


@pytest.mark.soak
@pytest.mark.parametrize("parts", RUNS)
def test_mean_reward_rises(tmp_path, parts):
    with Run(tmp_path, str(ROOT / "configs/quickstart.yaml"), "name=test", f"trainer.steps={NUM_STEPS}", "data.validation=null",
             *RUNS[parts]) as run:  # fmt: skip
        assert run.wait(600) == 0, run.output
    found = steps(tmp_path / "runs/test")
    rewards = [m["reward/mean"] for m in found]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1, rewards
    if "token_tis" in parts:
        assert all(abs(m["off_policy/ess"] - 1) < 1e-3 and m["off_policy/masked"] == 0 for m in found)
    if "dapo" in parts:
        assert any(m["dynamic_sampling/rounds"] > 1 for m in found)
        assert any(m["dynamic_sampling/from_last_step"] for m in found)
    if "adaptive KL" in parts:
        assert len({m["kl/coefficient"] for m in found}) > NUM_STEPS / 2
        assert max(m["critic/explained_variance"] for m in found) > 0.2
    if "moving reference" in parts:
        assert found[1]["kl/ref"] > 0
    if "server's log-probs" in parts:
        assert all("rollout/logprob_diff_mean" not in m and "entropy" not in m for m in found)
    if "gdpo" in parts:
        for m in found:
            total = m["reward/last_integer_mean"] + 0.2 * m["reward/completed_mean"]
            assert m["reward/mean"] == pytest.approx(total)


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
