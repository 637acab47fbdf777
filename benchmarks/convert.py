#!/usr/bin/env python3
"""How much host memory does a conversion take? Random weights of a 70B model's widths, to Megatron and back.

    python benchmarks/convert.py [--layers 1 2] [--out benchmarks/results/convert_cpu.json]

With few layers, as disks are small: a second number of them shows that memory does not grow with it. The folder that
comes back must have the files that went in, byte for byte.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from machine import describe_machine, versions  # noqa: E402
from shapes import SHAPES  # noqa: E402

LLAMA_70B = {  # Llama 3.1's numbers on the Hugging Face hub
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CASES = {"llama-70b": LLAMA_70B, "tiny": SHAPES["tiny"]}
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=CASES, default="llama-70b")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="for two copies of the weights; by default that of temporary files")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/convert_cpu.json")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    report = {
        "command": " ".join(["python", "benchmarks/convert.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "versions": versions("megarl", "torch", "megatron-core", "safetensors"),
        "shape": options.shape,
        "results": [],
    }
    for num_layers in options.layers:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            report["results"].append(convert(CASES[options.shape] | {"num_hidden_layers": num_layers}, Path(folder)))
        print(report["results"][-1], flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def convert(config: dict, folder: Path) -> dict:
    """The figures of both directions, for a model with the layers of `config`."""
    sizes, digests = in_child(write_random_model, config, folder / "model")
    to_megatron = in_child(measure, "import", folder / "model", folder / "checkpoint")
    shutil.rmtree(folder / "model")
    to_hf = in_child(measure, "export", folder / "checkpoint", folder / "back")
    weights = json.loads((folder / "back" / "conversion.json").read_text())["weights"]
    assert {name: record["sha256"] for name, record in weights.items()} == digests, "it came back as something else"
    return {
        "layers": config["num_hidden_layers"],
        "model_gb": round(sum(sizes) / GB, 2),
        "largest_tensor_gb": round(max(sizes) / GB, 2),
        "to_megatron": to_megatron,
        "to_hf": to_hf,
    }


def measure(direction: str, source: Path, out: Path) -> dict:
    """In a process of its own: the most memory that it ever had, and what of that its imports took before."""
    from megarl.engine.hf.export import export_hf
    from megarl.engine.hf.import_hf import import_hf

    imports_gb, start = peak_gb(), time.perf_counter()
    (export_hf if direction == "export" else import_hf)(source, out)
    wall_s = time.perf_counter() - start
    return {"peak_gb": round(peak_gb() - imports_gb, 2), "imports_gb": round(imports_gb, 2), "wall_s": round(wall_s, 1)}


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB


def write_random_model(config: dict, folder: Path) -> tuple[list[int], dict[str, str]]:
    """An HF folder as an export writes it; returns the bytes of its tensors, and the digests of its files."""
    import numpy as np
    import torch

    from megarl.checkpoint.folder import record_all
    from megarl.engine.hf.export import plan_files
    from megarl.engine.hf.layout import stored_weights
    from megarl.engine.hf.shape import ModelShape
    from megarl.engine.hf.streaming import write_safetensors

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shape = ModelShape.read(folder)
    sizes = {name: size for weight in stored_weights(shape, "lm") for name, size in weight.hf_shapes(shape).items()}
    shapes = {name: torch.empty(size, dtype=torch.bfloat16, device="meta") for name, size in sizes.items()}
    total = sum(tensor.nbytes for tensor in shapes.values())
    free = shutil.disk_usage(folder).free
    assert free > 2.1 * total, f"two copies of {total / GB:.1f} GB, and {folder} has room for {free / GB:.1f} GB"
    generator = np.random.default_rng(0)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in sizes.items():
            bits = generator.integers(0x3A00, 0x3D00, size, dtype=np.uint16)  # as bfloat16 from 0.0005 to 0.03
            yield name, torch.from_numpy(bits).view(torch.bfloat16)

    plan = plan_files(shapes, "5GB")
    write_safetensors(folder, tensors(), shapes, plan)
    records = record_all(folder, plan.filename_to_tensors)
    return [tensor.nbytes for tensor in shapes.values()], {name: record["sha256"] for name, record in records.items()}


def in_child(function, *arguments):
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


if __name__ == "__main__":
    main()
