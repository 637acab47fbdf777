#!/usr/bin/env python3
"""Write a model of a real shape with random weights, and the toy's tokenizer: layouts and memory can be tried without a hub.

python benchmarks/make_random_model.py qwen2.5-1.5b models/random-1.5b
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from shapes import SHAPES, write_random_model  # noqa: E402

from megarl.data import toy  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    write_random_model(options.shape, str(options.folder), options.dtype)
    with tempfile.TemporaryDirectory() as folder:
        toy.make(folder, seed=0)
        for file in Path(folder, "model").iterdir():
            if "token" in file.name or "template" in file.name:
                shutil.copy(file, options.folder)


if __name__ == "__main__":
    main()
