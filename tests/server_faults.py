"""A real actor and a real server whose processes are killed and stopped while the fleet works with them."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

from end_to_end import tagged_processes

from megarl.cluster.cluster import Cluster
from megarl.cluster.run_tag import RUN_VARIABLE
from megarl.config import Config
from megarl.data import toy
from megarl.data.chat import load_tokenizer
from megarl.rollout.fleet import Fleet
from megarl.sample import Prompt

SYNC_TIMEOUT_S = 10


def survive(folder: Path, device: str, **settings) -> SimpleNamespace:
    """Push, have the server hang in the next push, have it die while it generates; what was seen on the way."""
    toy.make(folder / "toy", seed=1)
    model = folder / "toy" / "model"
    config = Config.model_validate(
        {
            "name": "faults",
            "device": device,
            "model": {"path": str(model), "dtype": "float32" if device == "cpu" else "bfloat16"},
            "data": {"train": "none"},
            "rollout": {"sampling": {"max_new_tokens": 64}, "max_retries": 0, "start_timeout_s": 300.0},
            "sync": {"timeout_s": SYNC_TIMEOUT_S},
            "cluster": {"call_timeout_s": 120.0},
        }
        | settings
    )
    tokenizer = load_tokenizer(model)
    inputs = SimpleNamespace(vocab_size=448, context_length=128, tokenizer=tokenizer)
    prompts = [Prompt([], [5 + i, 6, 7]) for i in range(16)]
    seen = SimpleNamespace(lines=[], metrics=[], killed=[])

    with (
        Cluster(config, device, folder / "logs") as cluster,
        Fleet(config, cluster, inputs, seen.lines.append) as fleet,
    ):
        cluster.start_servers()
        if config.placement == "colocated":
            fleet.connect()
        fleet.attach(cluster.start_role("actor"))
        seen.metrics.append(fleet.push(1))
        if config.placement == "disaggregated":  # where nobody shares the GPU a server may hang for a while
            signal_schedulers(cluster, signal.SIGSTOP)
        seen.metrics.append(fleet.push(2))

        def kill_once() -> None:
            if not seen.killed:
                seen.killed = signal_schedulers(cluster, signal.SIGKILL)
            fleet._tend()

        samples = fleet.client.generate(prompts, 8, tokenizer, while_waiting=kill_once)
        seen.versions = sorted({sample.policy_version for sample in samples})
        seen.num_samples, seen.restarts = len(samples), fleet.restarts
        seen.metrics.append(fleet.push(3))
    return seen


def signal_schedulers(cluster: Cluster, number: signal.Signals) -> list[int]:
    """Signal the processes of this run's servers that hold the model; their pids."""
    pids = [
        pid
        for pid, command in tagged_processes(cluster.tag.run_id, RUN_VARIABLE).items()
        if "sglang::scheduler" in command
    ]
    for pid in pids:
        os.kill(pid, number)
    return pids
