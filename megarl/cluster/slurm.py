"""The tasks of a SLURM job, called by launch/slurm/job.sh with the arguments of `megarl train`.

`check`, on the first node before anything is started, prints the port for the head of the Ray cluster. `run`, once on
each node, with the cluster's token on standard input: all are nodes of a Ray cluster, and the first, its head, trains on
it; a single node trains without. The exit code of that task is that of `megarl train`; where the job is to be requeued, it
is 0 and there is the file MEGARL_REQUEUE: after another code SLURM would end the other tasks, and might do so once more
when they run again.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from megarl import cli
from megarl.checkpoint.folder import checkpoints_of
from megarl.cluster.node import GONE_S, Head, RayNode, pick_port, ray_node
from megarl.cluster.slurm_checks import Job, check, may_restart
from megarl.config import Config, load
from megarl.errors import ConfigError, RunError
from megarl.machine import resolve_device, visible_gpus
from megarl.rollout.launch import die_with_parent, wait_for

INTERRUPTED = 130
FIRST_PORT, NUM_PORTS = 20000, 10000  # below those that the kernel gives to whoever wants any
POLL_S = 1.0


def main(arguments: list[str]) -> int:
    what, *arguments = arguments
    if what == "train":  # the child of `run`
        die_with_parent(int(arguments[0]), signal.SIGTERM)
        return cli.main(["train", *arguments[1:]])
    try:
        job = Job.read(os.environ)
        options = cli.parse(["train", *arguments])
        if options.seeds is not None:
            raise ConfigError("--seeds: a job is one run; submit one for each seed, with seed=K name=NAME-seedK")
        if what == "check":
            config = load_config(options, job, "auto")
            check(job, config, resolve_device(config))
            print(pick_port(FIRST_PORT + job.job_id % NUM_PORTS))
            return 0
        address = f"{os.environ['SLURM_LAUNCH_NODE_IPADDR']}:{os.environ['MEGARL_PORT']}"
        config = load_config(options, job, address)
        return work(job, config, address) if job.task else lead(job, config, address, options, arguments)
    except ConfigError as error:
        return cli.fail(error, 2)
    except RunError as error:
        return cli.fail(error, 1)


def load_config(options: argparse.Namespace, job: Job, address: str) -> Config:
    several = [f"cluster.ray_address={address}"] if len(job.nodes) > 1 else []
    return load(options.config, [*options.overrides, *several])


def lead(job: Job, config: Config, address: str, options: argparse.Namespace, arguments: list[str]) -> int:
    """The first task: the head of the Ray cluster, and the training."""
    messages = Messages()
    if options.resume == "never" or checkpoints_of(config.run_path):  # another run's checkpoint is for the first start
        arguments = [*arguments, "--resume", "auto"]
    try:
        with contextlib.ExitStack() as stack:
            environment = {}
            if len(job.nodes) > 1:
                node = stack.enter_context(this_node(job, config, address))
                say(f"the head of the Ray cluster is {job.node} ({address})")
                join(job, address, node)
                arguments, environment = [*arguments, "--ray-address", address], node.environment
            code = messages.train(arguments, environment)
    except KeyboardInterrupt:
        code = cli.fail("interrupted before the training has started", INTERRUPTED)
    if messages.is_warned and not messages.is_stopped and code in (INTERRUPTED, -signal.SIGTERM, -signal.SIGUSR1):
        if may_restart(job, config.run_path):
            Path(os.environ["MEGARL_REQUEUE"]).touch()
            return 0
        text = f"restarted {job.max_restarts} times (MEGARL_MAX_RESTARTS) without a newer checkpoint: the job ends"
        return cli.fail(f"{text}; it needs a longer time limit (sbatch --time)", 1)
    return code if code >= 0 else 128 - code


def work(job: Job, config: Config, address: str) -> int:
    """Any other task: a node of the cluster for as long as there is a head."""
    is_told = threading.Event()  # that another task has failed, or the job is cancelled: the head ends the cluster
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # the others are for the training alone
        signal.signal(number, lambda number, frame: is_told.set() if number == signal.SIGTERM else None)
    head = Head(address)
    if not wait_for(lambda: head.answers() or is_told.is_set(), job.join_timeout_s):
        what = f"the head of the Ray cluster, {job.nodes[0]}, has not answered at {address}"
        raise RunError(f"{job.node}: {what} within {job.join_timeout_s:g} s (MEGARL_JOIN_TIMEOUT_S)")
    if not is_told.is_set():
        with this_node(job, config, address) as node:
            while not head.is_gone(0.0 if is_told.is_set() else GONE_S):
                if head.answers():
                    node.check()
                time.sleep(POLL_S)
    return 0


def this_node(job: Job, config: Config, address: str) -> contextlib.AbstractContextManager[RayNode]:
    token = sys.stdin.readline().strip()
    assert token, "the token of the Ray cluster is not on standard input"
    os.environ.pop("RAY_AUTH_TOKEN", None)  # the user's, which Ray would take before a file
    return ray_node(
        name=job.node,
        run_id=f"megarl-slurm.{job.node}-{job.job_id:08x}",
        address=address,
        is_head=job.task == 0,
        token=token,
        num_cpus=job.cpus,
        num_gpus=len(visible_gpus()) if resolve_device(config) == "cuda" else 0,
        timeout_s=job.join_timeout_s,
    )


def join(job: Job, address: str, node: RayNode) -> None:
    """Wait until all nodes are in the cluster. RunError where some are not in time: the child has said which."""
    command = [sys.executable, "-m", "megarl.cluster.join", address, ",".join(job.nodes), f"{job.join_timeout_s:g}"]
    if subprocess.run(command, env=os.environ | node.environment, stdin=subprocess.DEVNULL).returncode != 0:
        raise RunError("the Ray cluster is not complete (MEGARL_JOIN_TIMEOUT_S): nothing was trained")
    say(f"{len(job.nodes)} nodes have joined the Ray cluster: {', '.join(job.nodes)}")


class Messages:
    """What the batch script and SLURM tell the first task: to save and go on later, or to save and stop. Each counts
    once, however often it comes: SLURM signals the tasks, and the script passes on what it gets."""

    def __init__(self) -> None:
        self.is_warned = self.is_stopped = False
        self._trainer: subprocess.Popen | None = None
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._receive)

    def train(self, arguments: list[str], environment: dict[str, str]) -> int:
        """The exit code of `megarl train`, as subprocess has it."""
        command = [sys.executable, "-m", "megarl.cluster.slurm", "train", str(os.getpid()), *arguments]
        # In a group of its own: a signal to that of the tasks comes from here, and once.
        self._trainer = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, process_group=0
        )
        return self._trainer.wait()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_warning, is_first = number == signal.SIGUSR1, not (self.is_warned or self.is_stopped)
        is_known = self.is_warned if is_warning else self.is_stopped
        self.is_warned |= is_warning
        self.is_stopped |= not is_warning
        if self._trainer is None:
            if is_first:
                raise KeyboardInterrupt
        elif not is_known:
            saves = is_warning and catches(self._trainer.pid, signal.SIGUSR1)  # else there is nothing yet to save
            self._trainer.send_signal(signal.SIGUSR1 if saves else signal.SIGTERM)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of this signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def say(text: str) -> None:
    print(f"megarl: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
