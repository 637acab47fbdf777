#!/usr/bin/env python3
"""What does a checkpoint cost a training? The steps before it, the copy to host memory, the steps while it is written.

python benchmarks/checkpoint.py --out checkpoint.json                      # all shapes, on one GPU
python benchmarks/checkpoint.py --shapes qwen2.5-0.5b --folder /dev/shm    # where to write
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import describe_machine, versions  # noqa: E402
from shapes import SHAPES  # noqa: E402
from trainer import fill, random_samples  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b", "qwen2.5-3b"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each of a step's two sequences")
    parser.add_argument("--steps", type=int, default=5, help="before the first save")
    parser.add_argument("--folder", type=Path, help="disk to write to; default: that of temporary files")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    cases = []
    for shape in options.shapes:
        cases.append({"shape": shape} | measure(shape, options))
        print(table(cases[-1:]), flush=True)
    report = {
        "command": " ".join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("torch", "megatron-core", "transformer-engine"),
        "cases": cases,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(cases))


def measure(shape: str, options: argparse.Namespace) -> dict:
    """Two saves: the first one also page-locks its host memory."""
    from megarl.algorithms.losses import sft_loss
    from megarl.checkpoint.folder import problems, publish
    from megarl.config import ModelConfig, OptimizerConfig, RoleConfig
    from megarl.engine import checkpoint, parallel
    from megarl.engine.engine import Engine
    from megarl.rollout.server import free_port

    role = RoleConfig(max_tokens_per_gpu=2 * options.length)
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), role, seed=1)
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="megarl-checkpoint-"))
    try:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SHAPES[shape]))
        settings = ModelConfig(path=str(model), dtype=options.dtype)

        def make_engine() -> Engine:
            engine = Engine(settings, role, load_weights=False)
            fill(engine)
            engine.use_optimizer(OptimizerConfig())
            return engine

        engine = make_engine()
        samples = random_samples(2, options.length, SHAPES[shape]["vocab_size"])

        def step() -> float:
            start = time.perf_counter()
            engine.train_step(samples, sft_loss, 1e-6)
            parallel.synchronize()
            return time.perf_counter() - start

        before = [step() for _ in range(options.steps)]
        writer = checkpoint.Writer(engine, model)
        result = {"step_s": statistics.median(before[1:])}
        for name in ("first", "second"):
            partial = folder / f"{name}.partial"
            (partial / "actor").mkdir(parents=True)
            start = time.perf_counter()
            num_bytes = writer.start(partial / "actor", checkpoint.Contents(optimizer=True))
            copied = time.perf_counter()
            during = []
            while not writer.is_written():
                during.append(step())
            written = time.perf_counter()
            records = writer.finish()
            publish(partial, {f"actor/{file}": about for file, about in records.items()})
            published = time.perf_counter()
            shutil.rmtree(folder / "first", ignore_errors=True)  # disks are small
            result["gb"] = num_bytes / 1e9
            result[name] = {
                "copy_s": copied - start,
                "write_s": written - copied,
                "finish_s": published - written,
                "step_while_writing_s": statistics.median(during) if during else None,
            }
        del engine, writer
        parallel.free_cache()
        engine = make_engine()
        start = time.perf_counter()
        found = problems(folder / "second")
        verified = time.perf_counter()
        assert not found, found
        checkpoint.load(engine, folder / "second" / "actor", checkpoint.Contents(optimizer=True))
        parallel.synchronize()
        return result | {"verify_s": verified - start, "load_s": time.perf_counter() - verified}
    finally:
        shutil.rmtree(folder)
        parallel.shutdown()


def table(cases: list[dict]) -> str:
    lines = [
        "| shape | GB | copy, first | copy, then | a step | a step while it is written | written | finish | verify | load |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        first, then = case["first"], case["second"]
        while_writing = then["step_while_writing_s"]
        cells = [f"{case['gb']:.1f}", f"{first['copy_s']:.2f} s", f"{then['copy_s']:.2f} s", f"{case['step_s']:.3f} s"]
        cells += [
            f"{while_writing:.3f} s" if while_writing else "-",
            f"{then['write_s']:.1f} s",
            f"{then['finish_s']:.2f} s",
        ]
        cells += [f"{case['verify_s']:.1f} s", f"{case['load_s']:.1f} s"]
        lines.append(f"| {case['shape']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
