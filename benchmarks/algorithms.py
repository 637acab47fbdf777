#!/usr/bin/env python3
"""Does the toy learn under each algorithm? Presets, and parts that no preset has; about 20 minutes on two cores.

.venv/bin/python benchmarks/algorithms.py [--out benchmarks/results/algorithms_cpu.json] [--only LABEL ...]
"""

import argparse
from pathlib import Path

from quickstart import ROOT, measure

PPO = ["algorithm.name=ppo", "algorithm.critic_warmup_steps=3", "roles.critic.optimizer.learning_rate=1e-3",
       "rollout.cpus_per_server=0.5"]  # fmt: skip
RUNS = {  # label -> overrides of configs/quickstart.yaml
    "grpo": [],
    "rloo, KL in the reward": ["algorithm.name=rloo", "algorithm.kl_coefficient=0.001"],
    "reinforce++, KL in the reward": ["algorithm.name=reinforce_plus_plus", "algorithm.kl_coefficient=0.001"],
    "ppo, adaptive KL": [*PPO, "algorithm.kl_coefficient=0.001", "algorithm.kl_target=0.1",
                         "algorithm.kl_horizon=2000"],
    "gspo": ["algorithm.name=gspo", "algorithm.mini_batch_size=64", "algorithm.clip_low=3e-3",
             "algorithm.clip_high=4e-3"],
    "cispo": ["algorithm.name=cispo", "algorithm.mini_batch_size=64"],
    "dapo, filter": ["algorithm.name=dapo", "algorithm.overlong={buffer_tokens: 1, filter: true}"],
    "dr_grpo, server's log-probs, 2 epochs": ["algorithm.name=dr_grpo", "algorithm.old_logprobs=rollout",
                                              "algorithm.epochs=2"],
    "opo, dual clip": ["algorithm.name=opo", "algorithm.policy_loss=dual_clip"],
    "reinforce++ baseline, moving reference": ["algorithm.name=reinforce_plus_plus_baseline",
                                               "algorithm.kl_coefficient=0.001",
                                               "roles.reference={refresh_every: 2, ema_decay: 0.9}"],
    "gdpo": ["algorithm.name=gdpo", "algorithm.reward={last_integer: 1.0, completed: 0.2}"],
    "sapo, token_tis": ["algorithm.name=sapo", "algorithm.off_policy={kind: token_tis}"],
    "ppo, length-adaptive lambda": [*PPO, "algorithm.gae={lam: null, length_adaptive_alpha: 0.5, returns_lam: 1.0}"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/algorithms_cpu.json")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="LABEL")
    options = parser.parse_args()
    measure("python benchmarks/algorithms.py", {label: RUNS[label] for label in options.only}, options.out)


if __name__ == "__main__":
    main()
