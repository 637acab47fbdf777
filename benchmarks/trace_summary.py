#!/usr/bin/env python3
"""What a GPU did during one profiled step: busy and idle time, and the kernels that took longest.

python benchmarks/trainer.py --shapes qwen2.5-1.5b --layouts dp2 --contenders engine-te --profile profile/
python benchmarks/trace_summary.py profile/1536-dp2-transformer_engine.json.gz
"""

import argparse
import collections
import gzip
import json

MATRIX_PRODUCTS = ("nvjet", "cutlass", "sm90_xmma_gemm")  # how cuBLAS names its kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="of torch.profiler, gzipped")
    parser.add_argument("--top", type=int, default=16)
    options = parser.parse_args()
    with gzip.open(options.trace) as file:
        events = json.load(file)["traceEvents"]
    work = [e for e in events if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    print("\n".join(summary(work, options.top)))


def summary(work: list[dict], top: int) -> list[str]:
    span, busy = span_and_busy(work)
    totals, counts = collections.Counter(), collections.Counter()
    for event in work:
        totals[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    products = sum(total for name, total in totals.items() if name.startswith(MATRIX_PRODUCTS))
    lines = [f"span {span / 1e3:.0f} ms, busy {busy / 1e3:.0f} ms ({busy / span:.1%}), {len(work)} kernels and copies; "
             f"matrix products {products / 1e3:.0f} ms", ""]  # fmt: skip
    lines += [f"{total / 1e3:8.1f} ms {counts[name]:6} x  {name[:100]}" for name, total in totals.most_common(top)]
    return lines


def span_and_busy(work: list[dict]) -> tuple[float, float]:
    """Microseconds from the first start to the last end, and those in which anything ran."""
    work = sorted(work, key=lambda event: event["ts"])
    busy, end = 0.0, work[0]["ts"]
    for event in work:
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    return end - work[0]["ts"], busy


if __name__ == "__main__":
    main()
