#!/usr/bin/env python3
"""How fast is a training step? The Engine with the policy loss, on dummy weights, against a bare Megatron-Core loop.

python benchmarks/trainer.py --out trainer.json                   # everything, on two GPUs
python benchmarks/trainer.py --shapes qwen2.5-1.5b --layouts dp2 --contenders bare-te engine-te --profile profile/
python benchmarks/trainer.py --bare ...                           # the bare loop alone
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import describe_machine, versions  # noqa: E402
from shapes import SHAPES  # noqa: E402

LAYOUTS = {"dp1": {}, "dp2": {}, "tp2": {"tensor_parallel": 2, "sequence_parallel": True}}
CONTENDERS = {  # who trains, on which layers
    "bare-te": ("bare", "transformer_engine"),
    "engine-te": ("engine", "transformer_engine"),
    "bare-local": ("bare", "local"),
    "engine-local": ("engine", "local"),
}
PEAK_TFLOPS = 989  # of an H100 or H200 SXM, dense bfloat16
PROMPT_SHARE = 8  # the first 1 / 8 of each sequence is not trained


def main() -> None:
    options = parse()
    cases = []
    for layout in options.layouts:
        world_size = int(layout[-1])
        for shape in options.shapes:
            results = run_ranks(world_size, layout, shape, options)
            cases += results
            print(table(results), flush=True)
    report = {
        "command": " ".join(["python", "benchmarks/trainer.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("torch", "megatron-core", "transformer-engine", "triton"),
        "cases": cases,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(cases))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen2.5-1.5b", "qwen2.5-7b"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["dp2", "tp2"])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["bare-te", "engine-te", "engine-local"])
    parser.add_argument("--bare", action="store_true", help="the bare loop alone: --contenders bare-te")
    parser.add_argument("--microbatches", type=int, default=4, help="of each data-parallel rank")
    parser.add_argument("--sequences", type=int, default=4, help="in a packed micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none", help="of the Engine")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="folder for a table and a trace of one step of each Engine")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.bare:
        options.contenders = ["bare-te"]
    return options


def run_ranks(world_size: int, layout: str, shape: str, options: argparse.Namespace) -> list[dict]:
    """The results of rank 0; all ranks end with this call."""
    import torch.multiprocessing as multiprocessing

    from megarl.rollout.server import free_port

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        results.write_text("[]")
        try:
            multiprocessing.spawn(
                rank_main, (world_size, free_port("127.0.0.1"), layout, shape, options, results), nprocs=world_size
            )
        except multiprocessing.ProcessRaisedException as error:
            if "OutOfMemoryError" not in str(error):
                raise
            done = json.loads(results.read_text())
            failed = options.contenders[len(done)]
            print(f"{shape} {layout} {failed}: out of memory; those after it were not run")
            return [*done, {"shape": shape, "layout": layout, "contender": failed, "failed": "out of memory"}]
        return json.loads(results.read_text())


def rank_main(rank: int, world_size: int, port: int, layout: str, shape: str, options, file: Path) -> None:
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
    from megarl.config import RoleConfig
    from megarl.engine import parallel

    parallel.initialize(rank, world_size, "127.0.0.1", port, RoleConfig(**LAYOUTS[layout]), seed=1)
    gc.collect()
    gc.freeze()  # as the actor's workers do
    results = []
    for contender in options.contenders:
        who, impl = CONTENDERS[contender]
        measured = (run_bare if who == "bare" else run_engine)(SHAPES[shape], layout, impl, options)
        results.append(
            {"shape": shape, "layout": layout, "contender": contender, **figures(shape, layout, measured, options)}
        )
        if rank == 0:
            file.write_text(json.dumps(results))
            print(table(results[-1:]), flush=True)
    parallel.shutdown()


def run_bare(shape: dict, layout: str, impl: str, options) -> dict:
    import bare_megatron

    lengths = [options.length] * options.sequences
    return bare_megatron.run_bare(
        shape, options.microbatches, lengths, impl, options.dtype, options.steps, options.warmup
    )


def run_engine(shape: dict, layout: str, impl: str, options) -> dict:
    import torch

    from megarl.algorithms.losses import policy_loss
    from megarl.config import ModelConfig, OptimizerConfig, RoleConfig
    from megarl.engine import parallel
    from megarl.engine.engine import Engine

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(shape))
        role = RoleConfig(
            max_tokens_per_gpu=options.sequences * options.length, recompute=options.recompute, **LAYOUTS[layout]
        )
        engine = Engine(ModelConfig(path=folder, dtype=options.dtype, transformer_impl=impl), role, load_weights=False)
    fill(engine)
    engine.use_optimizer(OptimizerConfig())
    num_samples = options.sequences * options.microbatches * parallel.data_parallel_size()
    samples = random_samples(num_samples, options.length, shape["vocab_size"])
    loss = partial(policy_loss, clip_low=0.2, clip_high=0.2, loss_aggregation="token_mean")

    def timed(call) -> float:
        parallel.synchronize()
        start = time.perf_counter()
        call()
        parallel.synchronize()
        return time.perf_counter() - start

    step = partial(engine.train_step, samples, loss, 1e-6)
    step_s = [timed(step) for _ in range(options.warmup + options.steps)][options.warmup :]
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    score_s = [timed(partial(engine.logprobs, samples, 1.0)) for _ in range(2)][1]
    if options.profile:
        profile(step, options.profile, f"{shape['hidden_size']}-{layout}-{impl}")
    for ddp in engine.runnable:
        ddp.grad_accs.clear()  # these hold the model through autograd's nodes, unseen by the garbage collector
    del engine, step
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return {"step_s": step_s, "peak_gb": peak_gb, "score_s": score_s}


def fill(engine) -> None:
    import torch

    with torch.no_grad():
        for parameter in engine.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def random_samples(number: int, length: int, vocab_size: int) -> list:
    import torch

    from megarl.sample import Prompt, Sample

    generator = torch.Generator().manual_seed(1)
    samples = []
    for index in range(number):
        ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
        prompt_length = length // PROMPT_SHARE
        sample = Sample.from_response(Prompt([], ids[:prompt_length]), ids[prompt_length:], group_id=0, index=index)
        sample.old_logprobs = torch.full((length,), -11.9)
        sample.advantages = torch.full((length,), 1.0 if index % 2 else -1.0)
        samples.append(sample)
    return samples


def profile(step, folder: Path, name: str) -> None:
    """Write what one step does, by kernel and by operator, and its trace."""
    import torch

    with torch.profiler.profile() as profiler:
        step()
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        averages = profiler.key_averages()
        keys = ("self_device_time_total", "self_cpu_time_total")
        tables = [averages.table(sort_by=key, row_limit=45, max_name_column_width=90) for key in keys]
        (folder / f"{name}.txt").write_text("\n".join(tables))
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))


def figures(shape: str, layout: str, measured: dict, options) -> dict:
    from megarl.engine.hf.flops import forward_flops
    from megarl.engine.hf.shape import ModelShape

    tensor_parallel = LAYOUTS[layout].get("tensor_parallel", 1)
    sequences = options.sequences * options.microbatches / tensor_parallel  # of one GPU
    step_s = statistics.median(measured["step_s"])
    tflops = 3 * sequences * forward_flops(ModelShape.from_hf(SHAPES[shape]), options.length) / step_s / 1e12
    result = {
        "step_s": round(step_s, 4),
        "spread_s": round(max(measured["step_s"]) - min(measured["step_s"]), 4),
        "tokens_per_s_per_gpu": round(sequences * options.length / step_s),
        "tflops_per_gpu": round(tflops, 1),
        "mfu": round(tflops / PEAK_TFLOPS, 4),
        "peak_gb": round(measured["peak_gb"], 1),
    }
    if "score_s" in measured:
        result["logprob_tokens_per_s_per_gpu"] = round(sequences * options.length / measured["score_s"])
    return result


def table(cases: list[dict]) -> str:
    lines = [
        "| shape | layout | contender | step s | tokens/s/GPU | TFLOP/s/GPU | MFU | peak GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in (case for case in cases if "failed" not in case):
        lines.append(
            f"| {c['shape']} | {c['layout']} | {c['contender']} | {c['step_s']:.3f} | {c['tokens_per_s_per_gpu']:,} | "
            f"{c['tflops_per_gpu']:.0f} | {c['mfu']:.1%} | {c['peak_gb']:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
