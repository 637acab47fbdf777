"""What a SLURM job lacks for a config is told before it starts; restarts without progress come to an end."""

import math
from dataclasses import replace

import pytest
from end_to_end import ROOT

from megarl.checkpoint.folder import name_of
from megarl.cluster.slurm_checks import Job, check, may_restart, seconds
from megarl.config import load
from megarl.errors import ConfigError

QUICKSTART = ROOT / "configs/quickstart.yaml"
JOB = Job(
    job_id=7,
    nodes=["n1", "n2"],
    node="n1",
    task=0,
    cpus=2,
    is_uniform=True,
    time_left_s=3600.0,
    lead_s=300.0,
    join_timeout_s=120.0,
    max_restarts=2,
)


def problems(job=JOB, *overrides, device="cpu"):
    config = load(QUICKSTART, ["cluster.ray_address=auto", *overrides])
    try:
        check(job, config, device)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("1-02:03:04", 93784.0),
        ("2:03:04", 7384.0),
        ("59:59", 3599.0),
        ("0:00", 0.0),
        ("UNLIMITED", math.inf),
        ("NOT_SET", math.inf),
    ],
)
def test_times_are_read_as_squeue_writes_them(text, expected):
    assert seconds(text) == expected


def test_what_a_task_knows_is_read_from_its_variables():
    variables = {
        "SLURM_JOB_ID": "7",
        "MEGARL_NODES": "n1,n2",
        "SLURMD_NODENAME": "n1",
        "SLURM_PROCID": "0",
        "SLURM_CPUS_ON_NODE": "2",
        "SLURM_JOB_CPUS_PER_NODE": "2(x2)",
        "MEGARL_TIME_LEFT": "1:00:00",
        "MEGARL_SIGNAL_LEAD": "300",
        "MEGARL_JOIN_TIMEOUT_S": "120",
        "MEGARL_MAX_RESTARTS": "2",
    }
    assert Job.read(variables) == JOB
    assert not Job.read(variables | {"SLURM_JOB_CPUS_PER_NODE": "2,4"}).is_uniform
    with pytest.raises(ConfigError, match="MEGARL_SIGNAL_LEAD: given '5m', wanted a number"):
        Job.read(variables | {"MEGARL_SIGNAL_LEAD": "5m"})


def test_a_job_with_all_that_a_config_needs_is_accepted():
    assert problems() == ""
    assert problems(replace(JOB, time_left_s=math.inf)) == ""


def test_a_job_with_fewer_nodes_than_a_role_is_refused_with_both_numbers():
    said = problems(replace(JOB, nodes=["n1"]), "roles.actor.nodes=2", "roles.actor.tensor_parallel=1")
    assert "nodes: roles.actor.nodes is 2, but the job has 1 (n1): set sbatch --nodes=2" in said


def test_nodes_that_are_too_small_are_refused_with_the_table_of_what_is_wanted():
    said = problems(JOB, "roles.actor.cpus_per_rank=2")
    assert "nodes: the job has 2 (n1, n2), too few or too small ones" in said
    assert "no node for actor: 4 CPU, 0 GPU on one node" in said
    assert problems(replace(JOB, is_uniform=False), "roles.actor.cpus_per_rank=2") == ""


def test_a_time_limit_too_short_for_a_checkpoint_is_refused_with_all_times_and_what_to_set():
    said = problems(replace(JOB, time_left_s=600.0))
    assert said.startswith("time limit: 600 s are too short for a checkpoint: 120 s for nodes to join")
    assert "300 s to start" in said and "360 s from the warning on" in said and "sbatch --time=13 (minutes)" in said
    assert problems(replace(JOB, time_left_s=780.0)) == ""
    alone = replace(JOB, nodes=["n1"], time_left_s=660.0)  # with nobody to wait for
    assert problems(alone, "roles.actor.cpus_per_rank=0.5") == ""


def test_a_warning_too_late_for_a_checkpoint_is_refused_with_what_to_set():
    said = problems(replace(JOB, lead_s=60.0))
    assert said.startswith("--signal=B:USR1@60: 60 s before the time limit are too late for a checkpoint")
    assert "set sbatch --signal=B:USR1@180 and MEGARL_SIGNAL_LEAD=180" in said
    assert problems(replace(JOB, lead_s=61.0), "checkpoint.deadline_s=1") == ""


def test_a_config_that_does_not_save_at_the_warning_is_refused():
    said = problems(JOB, "checkpoint.save_on=[SIGTERM]")
    assert said.startswith("checkpoint.save_on: given ['SIGTERM'], without SIGUSR1 nothing is saved")


def test_all_that_is_wrong_is_told_at_once():
    said = problems(replace(JOB, nodes=["n1"], time_left_s=60.0, lead_s=10.0), "roles.actor.nodes=2")
    assert [line.partition(":")[0] for line in said.splitlines()] == ["nodes", "--signal=B", "time limit"]


def test_restarts_end_where_there_is_no_newer_checkpoint(tmp_path):
    run = tmp_path / "runs/x"
    assert [may_restart(JOB, run) for _ in range(4)] == [True, True, False, False]
    (run / "checkpoints" / name_of(5)).mkdir(parents=True)
    assert [may_restart(JOB, run) for _ in range(3)] == [True, True, False]
    assert may_restart(replace(JOB, job_id=8), run)
