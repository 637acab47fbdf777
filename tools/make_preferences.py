#!/usr/bin/env python3
"""Preference pairs for DPO or a reward model from the samples that a run has logged: best against worst of each group.

    tools/make_preferences.py RUN OUT [--margin 0.5] [--first-step N] [--last-step N]

RUN logs every response with trainer.num_logged_samples=null; groups that it did not log whole are left out. Train on
OUT with data.prompt_key=prompt.
"""

import argparse
import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch loads: this needs no GPU

from megarl.errors import ConfigError
from megarl.make_preferences import write_pairs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="a run's folder, with samples.jsonl")
    parser.add_argument("out", metavar="OUT", help="a JSONL file to write; never overwritten")
    parser.add_argument("--margin", type=float, default=0.5, help="the least difference of the two rewards")
    parser.add_argument("--first-step", type=int, metavar="N", help="leave out the steps before")
    parser.add_argument("--last-step", type=int, metavar="N", help="leave out the steps after")
    options = parser.parse_args()
    try:
        print(write_pairs(options.run, options.out, options.margin, options.first_step, options.last_step))
    except ConfigError as error:
        print(f"make_preferences: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
