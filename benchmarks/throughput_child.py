"""`megarl train` as a child that ends with its parent: python throughput_child.py PARENT_PID CONFIG OVERRIDE..."""

import os
import signal
import sys

import profiled_run

from megarl.cli import main
from megarl.rollout.launch import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    if profiled_run.STEP in os.environ:
        profiled_run.install()
    sys.exit(main(["train", *sys.argv[2:]]))
