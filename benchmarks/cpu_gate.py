#!/usr/bin/env python3
"""Has megarl's own code become slower? Its time as a ratio to a reference's in the same run, in turns with it.

    python benchmarks/cpu_gate.py        # measure the limits anew: benchmarks/results/cpu_gate.json; about 3 minutes

How fast the machine is goes away in a ratio. The model is tiny, so that most of the time is megarl's and not torch's.
It is CPU time of one process: others beside it hardly change it, and what it waits for is not in it.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from shapes import SHAPES  # noqa: E402

RESULTS = ROOT / "benchmarks/results/cpu_gate.json"
AGAINST = {  # ratio -> (the reference, the limit as a multiple of the ratio as it was measured)
    "train_step": ("Megatron-Core's own loop (bare_megatron.py)", 1.35),
    "logprobs": ("transformers' forward pass with log-softmax and entropy", 1.35),
    "client": ("HTTP requests with the same bodies, and their JSON read", 1.6),
}
SHAPE = SHAPES["tiny"]
NUM_SEQUENCES, LENGTH, PER_MICROBATCH = 16, 64, 4
PAIRS = 15
NUM_PROMPTS, GROUP_SIZE, NUM_TOKENS, ROUNDS = 8, 8, 16, 7
BUSY = "while True: pass"  # what another process does meanwhile


def too_slow(ratios: dict[str, float]) -> list[str]:
    """A line for each that is above its limit."""
    kept = json.loads(RESULTS.read_text())["ratios"]
    return [
        f"{name}: {ratio:.2f} times {AGAINST[name][0]}; the limit is {kept[name]['limit']:.2f}, measured was "
        f"{kept[name]['reference']:.2f} ({RESULTS.relative_to(ROOT)})"
        for name, ratio in ratios.items()
        if ratio > kept[name]["limit"]
    ]


def ratio_in_turns(ours: Callable, reference: Callable, pairs: int) -> float:
    """Of the medians of CPU time; the first two calls of both are not counted."""
    times: tuple[list[float], list[float]] = [], []
    for number in range(pairs + 2):
        for call, found in zip((ours, reference), times):
            start = time.process_time()
            call()
            if number >= 2:
                found.append(time.process_time() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


def engine_ratios() -> dict[str, float]:
    """On one rank, with Megatron's groups set up."""
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        engine, samples = tiny_engine(Path(folder)), tiny_samples()
        reference = transformers_logprobs(Path(folder), samples)
        return {
            "train_step": ratio_in_turns(train_step(engine, samples), bare_step(), PAIRS),
            "logprobs": ratio_in_turns(partial(engine.logprobs, samples, 1.0), reference, PAIRS),
        }


def client_ratio(client, tokenizer) -> float:
    """`client`: a RolloutClient of one server on this machine."""
    import aiohttp

    from megarl.data.chat import render
    from megarl.sample import Prompt

    questions = [f"Tom has {number} apples and buys 3 more." for number in range(NUM_PROMPTS)]
    prompts = [Prompt([], render(tokenizer, [{"role": "user", "content": question}])) for question in questions]
    bodies = [client._generate_body(prompt.token_ids, GROUP_SIZE, 1.0, NUM_TOKENS, None) for prompt in prompts]
    url = f"{client.urls[0]}/generate"

    async def request(session: aiohttp.ClientSession, body: dict) -> list:
        async with session.post(url, json=body) as response:
            return await response.json()

    async def requests() -> list:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(request(session, body) for body in bodies))

    def ours() -> list:
        return client.generate(prompts, GROUP_SIZE, tokenizer, max_new_tokens=NUM_TOKENS)

    def bare() -> list:
        return asyncio.run(requests())

    return ratio_in_turns(ours, bare, ROUNDS)


def tiny_engine(folder: Path):
    from trainer import fill

    from megarl.config import ModelConfig, OptimizerConfig, RoleConfig
    from megarl.engine.engine import Engine

    (folder / "config.json").write_text(json.dumps(SHAPE))
    model = ModelConfig(path=str(folder), dtype="float32", transformer_impl="local")
    engine = Engine(model, RoleConfig(max_tokens_per_gpu=PER_MICROBATCH * LENGTH), load_weights=False)
    fill(engine)
    engine.use_optimizer(OptimizerConfig())
    return engine


def tiny_samples() -> list:
    from trainer import random_samples

    return random_samples(NUM_SEQUENCES, LENGTH, SHAPE["vocab_size"])


def train_step(engine, samples) -> Callable:
    from megarl.algorithms.losses import policy_loss

    loss = partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="token_mean")
    return partial(engine.train_step, samples, loss, 1e-6)


def bare_step() -> Callable:
    import bare_megatron
    import torch
    from megatron.core.distributed import finalize_model_grads

    model = bare_megatron.build_model(SHAPE, "local", torch.float32)
    optimizer = bare_megatron.build_optimizer(model, torch.float32)
    model.config.finalize_model_grads_func = finalize_model_grads
    lengths, generator = [LENGTH] * PER_MICROBATCH, torch.Generator().manual_seed(1)
    one = partial(bare_megatron.random_microbatch, SHAPE, lengths, "local", torch.float32, generator)
    microbatches = [one() for _ in range(NUM_SEQUENCES // PER_MICROBATCH)]
    return partial(bare_megatron.train_step, model, optimizer, microbatches)


def transformers_logprobs(folder: Path, samples: list) -> Callable:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    tokens_BL = torch.stack([sample.token_ids for sample in samples])

    @torch.no_grad()
    def score() -> list:
        results = []
        for ids in tokens_BL.split(PER_MICROBATCH):
            logprobs = model(ids).logits[:, :-1].float().log_softmax(-1)
            entropies = -(logprobs.exp() * logprobs).sum(-1)
            results.append((logprobs.gather(-1, ids[:, 1:, None]), entropies))
        return results

    return score


def main() -> None:
    import gpu_watch
    from machine import versions

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11, help="of each kind, in fresh processes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        sets = measure(Path(folder), options.runs)
    ratios = {}
    for name, (against, margin) in AGAINST.items():
        alone, beside = (sorted(round(run[name], 3) for run in runs) for runs in sets)
        reference = statistics.median(alone)
        limit = round(margin * reference, 3)
        ratios[name] = {"against": against, "reference": reference, "limit": limit, "alone": alone, "beside": beside}
        spread = f"{alone[0]:.2f} to {alone[-1]:.2f}, beside busy processes {beside[0]:.2f} to {beside[-1]:.2f}"
        print(f"{name}: {reference:.2f} ({spread}); limit {limit:.2f}")
    report = {
        "command": "python benchmarks/cpu_gate.py" + f" --runs {options.runs}" * (options.runs != 11),
        "date": time.strftime("%Y-%m-%d"),
        "machine": gpu_watch.describe(),
        "versions": versions("torch", "megatron-core", "sglang", "transformers", "aiohttp"),
        "load_before": load,  # what else the machine did; `beside`: as many busy processes as cores were added
        "ratios": ratios,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(folder: Path, runs: int) -> tuple[list[dict], list[dict]]:
    """Ratios of runs alone, and of runs beside as many busy processes as there are cores."""
    import multiprocessing

    from megarl.data import toy
    from megarl.rollout.server import Server

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megarl.engine.engine", "transformers"])
    toy.make(folder / "toy", seed=0)
    model = str(folder / "toy/model")
    server = Server(model, "float32", "cpu", 1, None, {}, folder / "server.log", start_timeout_s=400)
    server.start()
    results: tuple[list[dict], list[dict]] = [], []
    try:
        server.wait_ready()
        for found, num_busy in zip(results, (0, len(os.sched_getaffinity(0)))):
            others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(num_busy)]
            try:
                for _ in range(runs):
                    with context.Pool(1) as pool:
                        found.append(pool.apply(one_run, (server.url, model)))
                    print(f"{num_busy} busy:", {name: round(ratio, 3) for name, ratio in found[-1].items()}, flush=True)
            finally:
                for other in others:
                    other.kill()
                    other.wait()
    finally:
        server.stop()
    return results


def one_run(url: str, model: str) -> dict[str, float]:
    from megarl.config import RoleConfig, SamplingConfig
    from megarl.data.chat import load_tokenizer
    from megarl.engine import parallel
    from megarl.rollout.client import RolloutClient
    from megarl.rollout.server import free_port

    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), RoleConfig(), seed=1)
    ratios = engine_ratios()
    parallel.shutdown()
    client = RolloutClient([url], SamplingConfig(max_new_tokens=NUM_TOKENS), 120, 1, 64, [2], 256)
    try:
        return ratios | {"client": client_ratio(client, load_tokenizer(model))}
    finally:
        client.close()


if __name__ == "__main__":
    main()
