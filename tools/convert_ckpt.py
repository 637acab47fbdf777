#!/usr/bin/env python3
"""Convert between checkpoints of runs and Hugging Face folders, one tensor at a time.

    tools/convert_ckpt.py --to-hf RUN_OR_CKPT OUT [--role critic] [--dtype bfloat16] [--max-shard-size 5GB] [--verify]
    tools/convert_ckpt.py --to-hf RUN_OR_CKPT OUT --lora peft [--base-model HF_FOLDER_OR_NAME]
    tools/convert_ckpt.py --from-hf HF_FOLDER OUT [--role critic] [--dtype bfloat16] [--verify]

A reward model or critic becomes a sequence classifier with one label. transformers' AutoModelForSequenceClassification
gives its scores where the role has value_head_bias: false, as it has no bias. OUT holds conversion.json: where it is
from, in which dtype, and the digest of each file of weights.
"""

import argparse
import os
import sys
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: a conversion needs no GPU and must not disturb one
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process, whatever the machine's own name resolves to
os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
warnings.simplefilter("ignore")  # Megatron's, on what else could be installed

from megarl.engine.hf.export import export_hf, export_peft
from megarl.engine.hf.import_hf import import_hf
from megarl.errors import ConfigError, RunError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    direction = parser.add_mutually_exclusive_group(required=True)
    to_hf, from_hf = ("RUN_OR_CKPT", "OUT"), ("HF_FOLDER", "OUT")
    direction.add_argument("--to-hf", nargs=2, metavar=to_hf, help="of a run its newest complete checkpoint")
    direction.add_argument("--from-hf", nargs=2, metavar=from_hf, help="OUT is a checkpoint with one role")
    parser.add_argument("--role", choices=["actor", "critic"], default="actor")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as it is stored")
    parser.add_argument("--max-shard-size", default="5GB", help="of one safetensors file")
    parser.add_argument(
        "--lora", choices=["merge", "peft"], default="merge", help="adapters: merged, or alone as PEFT's"
    )
    parser.add_argument("--base-model", help="what the adapters are of; default: the model that the run began with")
    verify = "compare log-probs, or scores, of transformers and Megatron; takes memory for all weights in float32"
    parser.add_argument("--verify", action="store_true", help=verify)
    options = parser.parse_args()
    if options.lora == "peft" and (options.from_hf or options.verify or options.dtype):
        parser.error("--lora peft goes with --to-hf alone, without --dtype and --verify")
    try:
        if options.to_hf and options.lora == "peft":
            print(export_peft(*options.to_hf, options.role, options.base_model))
        elif options.to_hf:
            print(export_hf(*options.to_hf, options.role, options.dtype, options.max_shard_size, options.verify))
        else:
            print(import_hf(*options.from_hf, options.role, options.dtype, options.verify))
    except KeyboardInterrupt:
        return 130
    except (ConfigError, RunError) as error:
        print(f"convert_ckpt: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
