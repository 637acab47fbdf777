"""`ray start --block` that ends with its parent: `python -m megarl.cluster.ray_start PARENT_PID OPTIONS`.

Free of other imports of megarl's: the start of a node should take no longer than Ray does.
"""

import signal
import sys

from megarl.rollout.launch import die_with_parent

if __name__ == "__main__":
    parent_pid, *options = sys.argv[1:]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # SLURM's warning is for the trainer, and would end all of Ray
    die_with_parent(int(parent_pid), signal.SIGTERM)
    from ray.scripts.scripts import cli

    cli(["start", "--block", *options])
