"""The process that speaks with Weights & Biases: `python -m megarl.monitor.sinks.wandb_child PARENT_PID`.

Reads lines of JSON: what `wandb.init` is told, then the lines of metrics.jsonl, then {"exit_code": 0 or 1}. Writes the
address of the run's page, if it has one. It ends with its parent, and W&B's own service with it.
"""

import json
import os
import signal
import sys

from megarl.rollout.launch import die_with_parent


def main(parent_pid: int) -> None:
    die_with_parent(parent_pid, signal.SIGKILL)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which calls its maker's server, offline too
    address = open(os.dup(1), "w")
    os.dup2(2, 1)  # what W&B prints goes to the log
    import wandb

    init = json.loads(sys.stdin.readline())
    # Of the run only its config and its metrics go there: no output, no source, no patch of it.
    settings = wandb.Settings(console="off", disable_code=True, disable_git=True, disable_job_creation=True)
    run = wandb.init(**init, settings=settings)
    with address:
        address.write(f"{run.url}\n" if run.url else "")
    warm_start = init["config"]["warm_start"]
    num_warm_start = warm_start["steps"] if warm_start["data"] else 0
    known: set[str] = set()
    exit_code = 1
    for line in sys.stdin:
        metrics = json.loads(line)
        if "exit_code" in metrics:
            exit_code = metrics["exit_code"]
            break
        axis = "step" if "step" in metrics else "warm_start/step"
        for name in metrics.keys() - known - {axis}:
            run.define_metric(name, step_metric=axis)
            known.add(name)
        run.log(metrics, step=place_of(metrics, num_warm_start), commit=True)
    run.finish(exit_code=exit_code)


def place_of(metrics: dict, num_warm_start: int) -> int:
    """A number of its own for each line of metrics.jsonl, the same in each part of a resumed run. W&B wants them to rise,
    and passes over those that it has, of steps that are done again."""
    if "step" not in metrics:
        return metrics["warm_start/step"]
    is_validation = any(name.startswith("validation/") for name in metrics)
    return num_warm_start + 1 + 2 * metrics["step"] + is_validation


if __name__ == "__main__":
    main(int(sys.argv[1]))
