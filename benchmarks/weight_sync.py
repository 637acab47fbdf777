#!/usr/bin/env python3
"""How fast do new weights reach the servers? A real actor, real SGLang servers, random weights, every push verified.

python benchmarks/weight_sync.py --out weight_sync.json                  # 7B, actor on one GPU, server on another
python benchmarks/weight_sync.py --placement colocated --shape qwen2.5-1.5b    # both on one GPU
python benchmarks/weight_sync.py --device cpu --shape tiny --buckets 1 --pushes 2
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import describe_machine, versions  # noqa: E402
from shapes import SHAPES, write_random_model  # noqa: E402

CEILING_MB = [16, 64, 256, 1024]


def main() -> None:
    options = parse()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    report = {
        "command": " ".join(["python", "benchmarks/weight_sync.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("torch", "megatron-core", "transformer-engine", "sglang", "ray"),
        "shape": options.shape,
        "ceilings": in_child(ceilings, options.device, options.placement) if options.ceilings else [],
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        in_child(write_random_model, options.shape, folder, options.dtype)
        report["pushes"] = measure(options, folder)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--placement", choices=["disaggregated", "colocated"], default="disaggregated")
    parser.add_argument("--buckets", type=int, nargs="+", default=[64, 256, 512, 1024, 2048], help="sizes in MiB")
    parser.add_argument("--pushes", type=int, default=7, help="of each size, after two that are not counted")
    parser.add_argument("--actor", type=json.loads, default={}, help='keys of roles.actor: {"tensor_parallel": 2, ...}')
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--server-tp", type=int, default=1)
    parser.add_argument("--no-ceilings", dest="ceilings", action="store_false")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the model is written, e.g. /dev/shm; by default the folder of temporary files",
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args()


def measure(options: argparse.Namespace, folder: str) -> list[dict]:
    from megarl.cluster.cluster import Cluster
    from megarl.config import Config
    from megarl.rollout.fleet import Fleet

    server_args = {"load_format": "dummy", "cuda_graph_max_bs": 1} if options.device == "cuda" else {}
    config = Config.model_validate(
        {
            "name": "weight-sync",
            "device": options.device,
            "placement": options.placement,
            "model": {"path": folder, "dtype": options.dtype},
            "data": {"train": "none"},
            "roles": {"actor": options.actor},
            "rollout": {
                "servers": options.servers,
                "tensor_parallel": options.server_tp,
                "server_args": server_args,
                "start_timeout_s": 400.0,
            },
        }
    )
    inputs = SimpleNamespace(vocab_size=SHAPES[options.shape]["vocab_size"], context_length=1024)
    inputs.tokenizer = SimpleNamespace(eos_token_id=0)
    logs = Path(options.out.parent if options.out else ".", "weight_sync_logs")
    version, results = 0, []
    with Cluster(config, options.device, logs) as cluster, Fleet(config, cluster, inputs, print) as fleet:
        cluster.start_servers()
        if options.placement == "colocated":
            fleet.connect()
        actor = cluster.start_role("actor")
        for bucket_mb in options.buckets:
            fleet.config = config.model_copy(update={"sync": config.sync.model_copy(update={"bucket_mb": bucket_mb})})
            fleet.sync = None
            fleet.attach(actor)
            pushes = []
            for _ in range(2 + options.pushes):
                fleet.make_room()
                start = time.perf_counter()
                pushes.append(fleet.push(version) | {"push_s": time.perf_counter() - start})
                version += 1
            fleet.make_room()
            results.append(figures(bucket_mb, len(fleet.sync.plans[0]), pushes[2:]))
            print(results[-1], flush=True)
    return results


def figures(bucket_mb: int, num_buckets: int, pushes: list[dict]) -> dict:
    rates = [push["sync/gb_per_s"] for push in pushes]
    return {
        "bucket_mb": bucket_mb,
        "buckets": num_buckets,
        "gb_per_s": round(statistics.median(rates), 1),
        "gb_per_s_range": [round(min(rates), 1), round(max(rates), 1)],
        "verify_s": round(statistics.median(push["sync/verify_s"] for push in pushes), 4),
        "push_s": round(statistics.median(push["push_s"] for push in pushes), 4),
        "canary_diff": max(push["sync/canary_diff"] for push in pushes),
    }


def ceilings(device: str, placement: str) -> list[dict]:
    """GB/s of a raw broadcast between two ranks (none where actor and server share a GPU), and of a copy on one device."""
    import torch

    from megarl.rollout.server import free_port

    results = [{"mb": mb, "copy_gb_per_s": round(copy_rate(mb, device), 1)} for mb in CEILING_MB]
    if device == "cuda":
        torch.cuda.empty_cache()
    if placement == "disaggregated" and (device == "cpu" or torch.cuda.device_count() > 1):
        with tempfile.TemporaryDirectory() as folder:
            rates = Path(folder, "rates.json")
            torch.multiprocessing.spawn(broadcast_rank, (free_port("127.0.0.1"), device, str(rates)), nprocs=2)
            for result, rate in zip(results, json.loads(rates.read_text())):
                result["broadcast_gb_per_s"] = round(rate, 1)
    return results


def copy_rate(mb: int, device: str) -> float:
    import torch

    source = torch.zeros(mb * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), source.nbytes, device)


def broadcast_rank(rank: int, port: int, device: str, file: str) -> None:
    os.environ |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    rates = []
    for mb in CEILING_MB:
        tensor = torch.zeros(mb * 2**20, dtype=torch.uint8, device=device)
        rates.append(rate(partial(dist.broadcast, tensor, 0), tensor.nbytes, device))
    if rank == 0:
        Path(file).write_text(json.dumps(rates))
    dist.destroy_process_group()


def rate(call, num_bytes: int, device: str, calls: int = 10) -> float:
    """GB/s of calls one behind another."""
    import torch

    def run() -> None:
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    start = time.perf_counter()
    run()
    return calls * num_bytes / (time.perf_counter() - start) / 1e9


def in_child(function, *arguments):
    """Its result, from a process of its own: what it takes of a GPU goes with it."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def table(report: dict) -> str:
    lines = [
        "| bucket MiB | buckets | GB/s (range) | with pause, canary and all | verify | canary |",
        "|---|---|---|---|---|---|",
    ]
    for p in report["pushes"]:
        low, high = p["gb_per_s_range"]
        lines.append(
            f"| {p['bucket_mb']} | {p['buckets']} | {p['gb_per_s']:g} ({low:g}-{high:g}) | {p['push_s'] * 1e3:.0f} ms | "
            f"{p['verify_s'] * 1e3:.0f} ms | {p['canary_diff']:.2g} |"
        )
    for c in report["ceilings"]:
        lines.append(
            f"ceiling at {c['mb']} MiB: broadcast {c.get('broadcast_gb_per_s', '-')} GB/s, copy {c['copy_gb_per_s']} GB/s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
