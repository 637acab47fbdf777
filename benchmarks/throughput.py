#!/usr/bin/env python3
"""How fast is RL end to end? `megarl train` on random or real weights, its steps taken apart: generation, rewards,
log-probs, update, sync, and what is between them.

    python benchmarks/throughput.py qwen2.5-1.5b qwen2.5-3b roles.actor.recompute=full --out throughput.json
    python benchmarks/throughput.py qwen2.5-7b --placement disaggregated --sweep sync.bucket_mb=256,1024
    python benchmarks/throughput.py models/mine algorithm.prompts_per_step=64 rollout.sampling.max_new_tokens=2048
    python benchmarks/throughput.py toy                                                  # on a CPU
    python benchmarks/throughput.py --compare before.json after.json --fail-if-slower 5%

A model is a Hugging Face folder, or the name of a shape that gets random weights and the toy's tokenizer. Overrides of
the config belong to the model before them, those before the first one to all. Prompts are random words, each of
data.max_prompt_tokens tokens with its template, and rewards are drawn by lot, so that there are advantages; overrides
may name other data and rewards. --sweep takes every combination of its values, for each model.
"""

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
import gpu_watch  # noqa: E402
from throughput_figures import compare, comparison_table, table  # noqa: E402
from throughput_inputs import DUMMIES  # noqa: E402
from throughput_run import Plan, measure  # noqa: E402

from megarl.machine import sees_gpu  # noqa: E402


def main() -> int:
    options = parse()
    if options.compare:
        return compare_files(*options.compare, options.fail_if_slower)
    with tempfile.TemporaryDirectory() as folder:
        return run(options, options.folder or Path(folder))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(DUMMIES)
    parser.add_argument("points", nargs="*", metavar="MODEL | key.path=value", help=f"models: {names} or folders")
    parser.add_argument("--sweep", nargs="+", action="extend", default=[], metavar="key.path=value,value")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if sees_gpu() else "cpu")
    parser.add_argument("--placement", choices=["colocated", "disaggregated"], default="colocated")
    parser.add_argument("--warmup", type=int, default=3, help="first steps, not counted")
    parser.add_argument("--repeats", type=int, default=5, help="steps that are")
    parser.add_argument("--point-limit", type=float, default=1800.0, metavar="SECONDS", help="for one point")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="for all of them")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="profile one more step of each point")
    parser.add_argument("--folder", type=Path, help="where models and runs are kept; default: a temporary one")
    parser.add_argument("--out", type=Path, help="JSON file, written after each step that counts")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE.json", "AFTER.json"))
    parser.add_argument(
        "--fail-if-slower", type=share, metavar="PERCENT", help="by more, beyond the noise: exit code 1"
    )
    options = parser.parse_intermixed_args()
    options.models = models_of(options.points)
    if problems := list(problems_of(options)):
        parser.error("; ".join(problems))
    return options


def models_of(texts: list[str]) -> list[tuple[str, list[str]]]:
    """Each model with its overrides."""
    common: list[str] = []
    models: list[tuple[str, list[str]]] = []
    for text in texts:
        if "=" not in text:
            models.append((text, list(common)))
        else:
            (models[-1][1] if models else common).append(text)
    return models


def share(text: str) -> float:
    """5% or 0.05"""
    value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: wanted 0% to below 100%")
    return value


def problems_of(options: argparse.Namespace):
    if options.compare:
        for text in (*options.points, *options.sweep):
            yield f"{text}: nothing is measured with --compare"
        return
    if not options.models:
        yield f"which model? {', '.join(DUMMIES)}, or a folder"
    yield from (f"--sweep {text}: key.path=value,value is expected" for text in options.sweep if "=" not in text)
    for model, overrides in options.models:
        if model not in DUMMIES and not Path(model).is_dir():
            yield f"{model}: neither a folder nor one of {', '.join(DUMMIES)}"
        keys = [text.partition("=")[0] for text in (*overrides, *options.sweep)]
        yield from (f"{model}: {key} is given twice" for key in dict.fromkeys(keys) if keys.count(key) > 1)
    if options.warmup < 1 or options.repeats < 1:
        yield f"--warmup {options.warmup} --repeats {options.repeats}: both are 1 or more; no step is like the first"


def run(options: argparse.Namespace, folder: Path) -> int:
    """Measure all points; 1 where one failed."""
    from machine import versions

    from megarl.monitor.run_directory import environment

    folder.mkdir(parents=True, exist_ok=True)
    machine = gpu_watch.describe()
    about = environment([], 0, options.device)
    report = {
        "command": " ".join(["python", "benchmarks/throughput.py", *map(shlex.quote, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "load_before": os.getloadavg()[0],
        "versions": about["versions"] | versions("sgl-kernel", "flashinfer-python", "triton"),
        "git": about["git"],
        "git_changes": about["git_changes"],
        "warmup": options.warmup,
        "repeats": options.repeats,
        "points": [],
    }
    plan = Plan(
        folder=folder,
        device=options.device,
        gpu_name=machine["gpus"][0] if options.device == "cuda" and machine["gpus"] else None,
        placement=options.placement,
        warmup=options.warmup,
        repeats=options.repeats,
        profile=options.profile,
        point_limit_s=options.point_limit,
        deadline=time.monotonic() + options.limit,
        report=lambda text: print(text, flush=True),
    )
    done: list[dict] = report["points"]

    def save(point: dict) -> None:
        if options.out:
            partial = options.out.with_suffix(".partial")
            partial.write_text(json.dumps(report | {"points": [*done, point]}, indent=1) + "\n")
            os.replace(partial, options.out)

    for model, overrides in options.models:
        for values in itertools.product(*map(values_of, options.sweep)):
            point = measure(model, [*overrides, *values], plan, save)
            done.append(point)
            if "failed" in point:
                plan.report(f"{point['label']}: failed: {point['failed']}")
    print(table(done))
    return int(any("failed" in point for point in done))


def values_of(sweep: str) -> list[str]:
    """key=1,2 -> key=1 and key=2; commas within brackets belong to a value."""
    key, _, text = sweep.partition("=")
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return [f"{key}={value}" for value in values]


def compare_files(before: Path, after: Path, limit: float | None) -> int:
    reports = [json.loads(file.read_text()) for file in (before, after)]
    for key in ("machine", "versions", "git", "warmup", "repeats"):
        found = [report[key] for report in reports]
        if found[0] != found[1]:
            print(f"{key}: {found[0]} -> {found[1]}")
    changes = compare(*(report["points"] for report in reports))
    if not changes:
        print("no point with steps is in both")
        return 2
    print(comparison_table(changes))
    slower = [c for c in changes if limit is not None and c.is_slower_than(limit)]
    for c in slower:
        print(f"slower than {limit:.0%}: {c.label}: {c.key} x {c.ratio:.3f}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
