#!/usr/bin/env python3
"""Do samples repeat under SGLang's deterministic inference, and what does it cost? One GPU, random weights.

    python benchmarks/deterministic.py --out deterministic.json
    python benchmarks/deterministic.py --device cpu --shape tiny     # the usual inference: there is no other on a CPU

A group of each prompt is sampled three times with the same seeds: all prompts together, in the opposite order, and
every eighth prompt alone. Samples are equal where token ids and log-probs are, to the last bit.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import describe_machine, versions  # noqa: E402
from shapes import SHAPES, write_random_model  # noqa: E402

DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
TOKENIZER = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")


def main() -> None:
    options = parse()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    report = {
        "command": " ".join(["python", "benchmarks/deterministic.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("torch", "sglang", "triton"),
        "shape": options.shape,
        "modes": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(options.shape, folder, DTYPES[options.device])
        for mode in ("usual", "deterministic") if options.device == "cuda" else ("usual",):
            report["modes"][mode] = measure(options, folder, mode == "deterministic")
            print(mode, report["modes"][mode], flush=True)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    repeated = report["modes"].get("deterministic")
    if repeated and repeated["equal"] < repeated["compared"]:
        sys.exit(f"only {repeated['equal']} of {repeated['compared']} samples repeat")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: str, deterministic: bool) -> dict:
    from megarl.config import SamplingConfig
    from megarl.rollout.client import RolloutClient
    from megarl.rollout.seeds import SERVER_ARGS, group_seeds
    from megarl.rollout.server import Server
    from megarl.sample import Prompt

    shape, limit, group_size = SHAPES[options.shape], options.max_new_tokens, options.group_size
    rng = random.Random(1)
    vocab_size, context_length = shape["vocab_size"], shape["max_position_embeddings"]
    longest = min(512, context_length - limit)
    lengths = [rng.randint(1, longest) for _ in range(options.prompts)]
    prompts = [Prompt([], [rng.randrange(vocab_size) for _ in range(length)]) for length in lengths]
    seeds = group_seeds(1, 1, prompts, group_size, limit, vocab_size)

    server_args = SERVER_ARGS if deterministic else {}
    log = Path(folder, "server.log")
    server = Server(folder, DTYPES[options.device], options.device, 1, None, server_args, log, start_timeout_s=600)
    server.start()
    try:
        server.wait_ready()
        client = RolloutClient([server.url], SamplingConfig(max_new_tokens=limit), 600, 0, 512, [], context_length)

        def generate(places) -> tuple[dict[int, list], float]:
            """(place of the prompt -> its group's token ids and log-probs, seconds)"""
            seeds_of_places = [seeds[i] for i in places] if deterministic else None
            start = time.perf_counter()
            samples = client.generate([prompts[i] for i in places], group_size, TOKENIZER, seeds=seeds_of_places)
            seconds = time.perf_counter() - start
            found = [(s.token_ids.tolist(), s.rollout_logprobs.tolist()) for s in samples]
            return {place: found[n * group_size : (n + 1) * group_size] for n, place in enumerate(places)}, seconds

        everything = list(range(options.prompts))
        generate(everything)  # compiles
        first, seconds = generate(everything)
        others = [generate(everything[::-1])[0], *(generate([place])[0] for place in everything[::8])]
        client.close()
    finally:
        server.stop()
    pairs = [pair for other in others for place in other for pair in zip(other[place], first[place], strict=True)]
    num_tokens = sum(len(ids) - lengths[place] for place, group in first.items() for ids, _ in group)
    return {
        "compared": len(pairs),
        "equal_tokens": sum(a[0] == b[0] for a, b in pairs),
        "equal": sum(a == b for a, b in pairs),
        "response_tokens": num_tokens,
        "tokens_per_s": round(num_tokens / seconds),
    }


if __name__ == "__main__":
    main()
