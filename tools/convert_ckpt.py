#!/usr/bin/env python3
"""Convert a checkpoint of a run to a Hugging Face folder.

    tools/convert_ckpt.py --to-hf RUN_OR_CKPT OUT [--max-shard-size 5GB]

A reward model or critic becomes a sequence classifier with one label. transformers' AutoModelForSequenceClassification
gives its scores where the role has value_head_bias: false, as it has no bias.
"""

import argparse
import os
import sys
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: a conversion needs no GPU and must not disturb one
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process, whatever the machine's own name resolves to
warnings.simplefilter("ignore")  # Megatron's, on what else could be installed

from megarl.engine.hf.export import export_hf
from megarl.errors import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to-hf", nargs=2, metavar=("RUN_OR_CKPT", "OUT"), required=True)
    parser.add_argument("--max-shard-size", default="5GB", help="of one safetensors file")
    options = parser.parse_args()
    try:
        print(export_hf(*options.to_hf, options.max_shard_size))
    except ConfigError as error:
        print(f"convert_ckpt: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
