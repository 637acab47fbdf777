"""The toy task improves under each estimator and each policy loss, parts combined so that five runs show them all."""

import pytest
from end_to_end import ROOT, Run, steps

NUM_STEPS = 40
RUNS = {
    "rloo, ppo": ("algorithm.name=rloo",),
    "dr_grpo, constant, gspo": ("algorithm.name=dr_grpo", "algorithm.policy_loss=gspo", "algorithm.clip_low=3e-3",
                                "algorithm.clip_high=4e-3", "algorithm.loss_aggregation=constant"),
    "opo, dual_clip, token_mean": ("algorithm.name=opo", "algorithm.policy_loss=dual_clip", "algorithm.loss_aggregation=token_mean"),
    "reinforce++, cispo, off-policy": ("algorithm.name=reinforce_plus_plus", "algorithm.policy_loss=cispo",
                                       "algorithm.off_policy={kind: token_tis}"),
    "reinforce++ baseline, sapo, KL": ("algorithm.name=reinforce_plus_plus_baseline", "algorithm.policy_loss=sapo",
                                       "algorithm.kl_coefficient=0.001", "algorithm.kl_estimator=k2"),
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
