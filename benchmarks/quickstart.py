#!/usr/bin/env python3
"""Does the quickstart learn? Seeds 1, 2, 3 and a control whose rewards are shuffled; about 6 minutes on two cores.

.venv/bin/python benchmarks/quickstart.py [--out benchmarks/results/quickstart_cpu.json]
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {  # label -> overrides of configs/quickstart.yaml
    "seed 1": ["seed=1"],
    "seed 2": ["seed=2"],
    "seed 3": ["seed=3"],
    "shuffled": ["seed=1", "debug.shuffle_rewards=true"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quickstart_cpu.json")
    measure("python benchmarks/quickstart.py", RUNS, parser.parse_args().out)


def measure(command: str, runs: dict[str, list[str]], out: Path) -> None:
    """Run the quickstart with each label's overrides, keep the figures in `out` and print a table of them."""
    results = {label: run(label, overrides) for label, overrides in runs.items()}
    env = next(result.pop("env") for result in results.values())
    report = {
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "platform": platform.platform()},
        "versions": env["versions"],
        "git": env["git"],
        "runs": results,
    }
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(results))


def run(label: str, overrides: list[str]) -> dict:
    name = f"benchmark-{re.sub('[^a-z0-9]+', '-', label.lower())}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", "megarl", "train", "configs/quickstart.yaml", f"name={name}", *overrides]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=1800)
    seconds = time.perf_counter() - start
    folder = ROOT / "runs" / name
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    rewards = [round(line["reward/mean"], 4) for line in steps]
    accuracy = [line["validation/reward_mean"] for line in lines if "validation/reward_mean" in line]
    return {
        "overrides": overrides,
        "wall_s": round(seconds, 1),
        "first_10": statistics.mean(rewards[:10]),
        "last_10": statistics.mean(rewards[-10:]),
        "held_out_before": accuracy[0],
        "held_out_after": accuracy[-1],
        "logprob_diff_mean_max": max(line.get("rollout/logprob_diff_mean", 0.0) for line in steps),
        "step_s_median": statistics.median(line["time/step_s"] for line in steps),
        "tokens_per_s_median": statistics.median(line["perf/tokens_per_s"] for line in steps),
        "rewards": rewards,
        "env": json.loads((folder / "env.json").read_text()),
    }


def table(results: dict) -> str:
    rows = ["| run | mean reward, first 10 -> last 10 steps | held-out accuracy | wall time |", "|---|---|---|---|"]
    for label, r in results.items():
        reward = f"{r['first_10']:.2f} -> {r['last_10']:.2f} ({r['last_10'] - r['first_10']:+.2f})"
        accuracy = f"{r['held_out_before']:.2f} -> {r['held_out_after']:.2f}"
        rows.append(f"| {label} | {reward} | {accuracy} | {r['wall_s']:.0f} s |")
    return "\n".join(rows)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


if __name__ == "__main__":
    main()
