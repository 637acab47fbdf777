#!/usr/bin/env python3
"""How long a round of rewards takes: 1,024 responses of 512 tokens in 128 groups, by each reward, in the pool.

.venv/bin/python benchmarks/rewards.py [--num-workers 1] [--out benchmarks/results/rewards_cpu.json]
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from machine import describe_machine, versions

from megarl.config_rewards import RewardConfig, RewardsConfig
from megarl.rewards.scorer import Scorer
from megarl.sample import Prompt, Sample

ROOT = Path(__file__).resolve().parents[1]
NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 128, 8, 512
NUM_ROUNDS = 5  # the first one waits for what the processes import
WORDS = "so we add the two numbers and then take half of what is left over from the first step".split()
TESTS = [{"expression": f"f({n})", "expected": n * n} for n in range(5)]
CASES: dict[str, dict] = {  # label -> algorithm.reward
    "gsm8k": {"gsm8k": {}},
    "math, whole numbers": {"math": {}},
    "math, compared by sympy": {"math": {}},
    "format": {"format": {}},
    "diversity": {"diversity": {}},
    "code, five tests each": {"code": {}},
    "gsm8k + format + length + completed": {
        "gsm8k": {},
        "format": {},
        "length": {"options": {"high": 400}},
        "completed": {},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/rewards_cpu.json")
    options = parser.parse_args()
    results = {label: measure(label, rewards, options.num_workers) for label, rewards in CASES.items()}
    report = {
        "command": f"python benchmarks/rewards.py --num-workers {options.num_workers}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("megarl", "math-verify", "sympy", "rapidfuzz", "numpy"),
        "responses": NUM_GROUPS * GROUP_SIZE,
        "tokens_each": NUM_TOKENS,
        "results": results,
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for label, result in results.items():
        print(f"{label:40} {result['round_s']:8.3f} s a round, {result['responses_per_s']:10,.0f} responses/s")


def measure(label: str, rewards: dict, num_workers: int) -> dict:
    """Median over all rounds but the first."""
    samples = make_samples(label)
    parts = {name: RewardConfig(**settings) for name, settings in rewards.items()}
    times = []
    with Scorer(parts, RewardsConfig(num_workers=num_workers), print) as scorer:
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            scored = scorer.score(samples)
            times.append(time.perf_counter() - start)
    median = statistics.median(times[1:])
    return {
        "round_s": round(median, 4),
        "first_round_s": round(times[0], 4),
        "responses_per_s": round(len(samples) / median),
        "latency_p50_s": scored.metrics["reward/latency_p50_s"],
        "latency_p99_s": scored.metrics["reward/latency_p99_s"],
        "reward_mean": statistics.fmean(sample.reward for sample in samples),
    }


def make_samples(label: str) -> list[Sample]:
    """Half of the responses are right."""
    generator = random.Random(label)
    samples = []
    for index in range(NUM_GROUPS * GROUP_SIZE):
        number, is_right = generator.randrange(1000), index % 2 == 0
        text = " ".join(generator.choices(WORDS, k=NUM_TOKENS - 40))
        answer, metadata = str(number), {"source": f"rows.jsonl:{index // GROUP_SIZE}", "tests": TESTS}
        given = number if is_right else number + 1
        if "sympy" in label:
            answer = rf"\frac{{{number}}}{{7}}x^2 + x"
            text += rf" \boxed{{x + \frac{{x^2 \cdot {given}}}{{7}}}}"
        elif "math" in label:
            text += rf" \boxed{{{given}}}"
        elif "code" in label:
            text += f"\n```python\ndef f(x):\n    return x ** {2 if is_right else 3}\n```"
        elif "format" in label:
            text = f"<think>{text}</think><answer>#### {given}</answer>"
        else:
            text += f"\n#### {given}"
        prompt = Prompt([{"role": "user", "content": "?"}], [1] * 64, answer, metadata)
        group_id = index // GROUP_SIZE
        samples.append(
            Sample.from_response(prompt, [2] * NUM_TOKENS, group_id=group_id, index=index, response_text=text)
        )
    return samples


if __name__ == "__main__":
    main()
