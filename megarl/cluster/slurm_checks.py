"""What must hold of a SLURM job before anything of it is started, and when it goes on after its time limit."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoint import folder as folders
from megarl.cluster.placement import Node, group_requests, plan_nodes
from megarl.config import Config
from megarl.errors import ConfigError, RunError
from megarl.machine import visible_gpus

EARLY_S = 60.0  # sbatch(1): the signal may be sent up to 60 seconds earlier than specified
END_S = 60.0  # for servers, ranks and Ray to end after the save
RESTARTS = "restarts.json"


@dataclass(frozen=True)
class Job:
    """As launch/slurm/job.sh and SLURM tell it to a task."""

    job_id: int
    nodes: list[str]
    node: str  # this task's
    task: int
    cpus: int  # of this node
    is_uniform: bool  # all nodes have as many CPUs
    time_left_s: float  # infinite without a limit
    lead_s: float  # of the warning before the limit
    join_timeout_s: float
    max_restarts: int  # in a row, without a newer checkpoint

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "Job":
        return cls(
            job_id=int(variables["SLURM_JOB_ID"]),
            nodes=variables["MEGARL_NODES"].split(","),
            node=variables["SLURMD_NODENAME"],
            task=int(variables["SLURM_PROCID"]),
            cpus=int(variables["SLURM_CPUS_ON_NODE"]),
            is_uniform="," not in variables["SLURM_JOB_CPUS_PER_NODE"],
            time_left_s=seconds(variables["MEGARL_TIME_LEFT"]),
            lead_s=number(variables, "MEGARL_SIGNAL_LEAD"),
            join_timeout_s=number(variables, "MEGARL_JOIN_TIMEOUT_S"),
            max_restarts=int(number(variables, "MEGARL_MAX_RESTARTS")),
        )


def number(variables: Mapping[str, str], name: str) -> float:
    try:
        return float(variables[name])
    except ValueError:
        raise ConfigError(f"{name}: given {variables[name]!r}, wanted a number") from None


def seconds(time: str) -> float:
    """What squeue says of a job's time: [DAYS-][[HOURS:]MINUTES:]SECONDS; infinite where there is no limit."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", time.strip())
    if not found:
        return math.inf  # UNLIMITED, NOT_SET
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def check(job: Job, config: Config, device: str) -> None:
    """Raises ConfigError with all that the job lacks for this config."""
    if found := [*check_nodes(job, config, device), *check_time(job, config)]:
        raise ConfigError("\n".join(found))


def check_nodes(job: Job, config: Config, device: str) -> Iterator[str]:
    name, role = max(config.roles.megatron.items(), key=lambda item: item[1].nodes)
    has = f"the job has {len(job.nodes)} ({', '.join(job.nodes)})"
    if role.nodes > len(job.nodes):
        yield f"nodes: roles.{name}.nodes is {role.nodes}, but {has}: set sbatch --nodes={role.nodes}, or fewer in the config"
    elif job.is_uniform:  # elsewhere it is known when all nodes have joined
        requests, total = group_requests(config, device), {"CPU": job.cpus, "GPU": len(visible_gpus())}
        try:
            plan_nodes(requests, [Node(node, node, total, total) for node in job.nodes])
        except RunError as error:
            yield f"nodes: {has}, too few or too small ones for this config: {error}"


def check_time(job: Job, config: Config) -> Iterator[str]:
    """The warning must leave time for a checkpoint, and the limit time for the start besides."""
    deadline_s, given = config.checkpoint.deadline_s, f"--signal=B:USR1@{job.lead_s:g}"
    lead_s = max(job.lead_s, deadline_s + END_S)
    if job.lead_s < lead_s:
        wanted = f"checkpoint.deadline_s: {deadline_s:g} and {END_S:g} s to end"
        text = f"{given}: {job.lead_s:g} s before the time limit are too late for a checkpoint ({wanted}): "
        yield f"{text}set sbatch --signal=B:USR1@{lead_s:g} and MEGARL_SIGNAL_LEAD={lead_s:g}, or a smaller deadline"
    if "SIGUSR1" not in config.checkpoint.save_on:
        text = (
            f"checkpoint.save_on: given {config.checkpoint.save_on}, without SIGUSR1 nothing is saved at the time limit"
        )
        yield f"{text}: add it"
    start_s = max([config.cluster.start_timeout_s, *(servers.start_timeout_s for servers in config.servers.values())])
    join_s = job.join_timeout_s if len(job.nodes) > 1 else 0.0
    needed_s = join_s + start_s + EARLY_S + lead_s
    if job.time_left_s < needed_s:
        parts = [f"{join_s:g} s for nodes to join (MEGARL_JOIN_TIMEOUT_S)"] if join_s else []
        parts += [f"{start_s:g} s to start (cluster.start_timeout_s, start_timeout_s of servers)"]
        parts += [f"{lead_s + EARLY_S:g} s from the warning on, which may come {EARLY_S:g} s early"]
        text = f"time limit: {job.time_left_s:g} s are too short for a checkpoint: {', '.join(parts)}"
        yield f"{text}: set sbatch --time={math.ceil(needed_s / 60)} (minutes) or more, or smaller ones of these"


def may_restart(job: Job, run_path: Path) -> bool:
    """Count a restart of this job; False where it would be one too many since there was a newer checkpoint."""
    file = run_path / RESTARTS
    steps = [folders.step_of(folder) for folder in folders.checkpoints_of(run_path)]
    now = {"job": job.job_id, "step": max(steps, default=None), "without_progress": 0}
    if file.exists():
        before = json.loads(file.read_text())
        if (before["job"], before["step"]) == (now["job"], now["step"]):
            now["without_progress"] = before["without_progress"] + 1
    run_path.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(now) + "\n")
    return now["without_progress"] < job.max_restarts
