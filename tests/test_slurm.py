"""Training by sbatch on a real SLURM of two nodes, both of them this machine: through its time limit, and to its end."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from end_to_end import ROOT, TAG, steps, tagged_processes, wait_until
from slurm_cluster import logs, slurm

from megarl.cluster.slurm import FIRST_PORT, NUM_PORTS

START_S, SAVE_S, END_S = 600, 180, 900
QUICKSTART, SFT = (str(ROOT / f"configs/{name}.yaml") for name in ("quickstart", "quickstart_sft"))
ON_BOTH = ("roles.actor.cpus_per_rank=1",)  # fills one node of two CPUs: the server is on the other


@pytest.fixture(scope="module")
def cluster():
    with slurm() as folder:
        yield folder


class Job:
    """A job of sbatch, called in `folder`; use as a context, which fails if anything of it is left."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        options: tuple[str, ...] = (),
        script: str = "train.sbatch",
        **variables: str,
    ):
        self.folder = folder
        self.tag = uuid.uuid4().hex
        self.before = ray_folders()
        names = {"MEGARL_ROOT": str(ROOT), "MEGARL_VENV": sys.prefix, "PYTHONPATH": str(ROOT), TAG: self.tag}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | names | variables
        command = ["sbatch", "--parsable", *options, str(ROOT / "launch/slurm" / script), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.id = done.stdout.strip()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception) -> None:
        if not self.has_ended():
            scancel("--signal=KILL", "--full", self.id)
        ended = wait_until(self.has_ended, 60)
        left = wait_until(lambda: not tagged_processes(self.tag), 60) or tagged_processes(self.tag)
        for pid in tagged_processes(self.tag):
            os.kill(pid, signal.SIGKILL)
        if exception == (None, None, None):
            assert ended and left is True, f"left of the job: {left}"
            assert ray_folders() <= self.before

    @property
    def output(self) -> str:
        file = self.folder / f"megarl-{self.id}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def state(self) -> str:
        return self.about("JobState") or "gone"

    def about(self, key: str) -> str:
        shown = subprocess.run(["scontrol", "show", "job", self.id], capture_output=True, text=True, timeout=60).stdout
        found = re.search(rf"\b{key}=(\S+)", shown)
        return found[1] if found else ""

    def has_ended(self) -> bool:
        return self.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED")

    def wait(self, timeout_s: float) -> int:
        """The exit code."""
        assert wait_until(self.has_ended, timeout_s), self.output
        return int(self.about("ExitCode").partition(":")[0])

    def wait_for_text(self, text: str, timeout_s: float) -> None:
        assert wait_until(lambda: text in self.output or self.has_ended(), timeout_s), self.output
        assert text in self.output, self.output

    def wait_for_step(self, run_path: Path, step: int) -> None:
        def is_there() -> bool:
            file = run_path / "metrics.jsonl"
            lines = file.read_text().splitlines() if file.exists() else []
            return any(json.loads(line).get("step", 0) >= step for line in lines)

        assert wait_until(lambda: is_there() or self.has_ended(), START_S), self.output
        assert not self.has_ended(), self.output


def scancel(*arguments: str) -> None:
    subprocess.run(["scancel", *arguments], check=True, capture_output=True, timeout=60)


def ray_folders() -> set[Path]:
    """The Ray nodes' folders of jobs: each has the token of its cluster."""
    return {file.parent for file in Path("/tmp").glob("megarl-ray-*/megarl-run.json") if "megarl-slurm." in read(file)}


def read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # of someone else's, or just removed
        return ""


def checkpoints(run_path: Path) -> list[str]:
    return sorted(path.name for path in (run_path / "checkpoints").glob("step_*"))


FEW = ("warm_start.steps=50", "trainer.steps=6", "data.validation=null", "checkpoint.deadline_s=60")
TWO_NODES = {  # config -> overrides
    SFT: ("roles.actor.nodes=2", "roles.actor.cpus_per_rank=2", "trainer.steps=300"),
    QUICKSTART: (*ON_BOTH, *FEW),
}


@pytest.mark.parametrize("config", [SFT, pytest.param(QUICKSTART, marks=pytest.mark.soak)])
def test_a_job_of_two_nodes_goes_on_after_its_time_limit_and_trains_to_its_end(tmp_path, cluster, config):
    """The port that the job's number gives is taken, and the warning comes by hand: limits are of whole minutes."""
    run_path = tmp_path / "runs/test"
    job = Job(tmp_path, config, "name=test", *TWO_NODES[config], options=("--time=60",))
    with socket.create_server(("", port := FIRST_PORT + int(job.id) % NUM_PORTS)), job:
        job.wait_for_text("2 nodes have joined the Ray cluster: n1, n2", START_S)
        assert re.search(rf"the head of the Ray cluster is n1 \(\S+:{port + 1}\)", job.output)
        tokens = [folder / "token" for folder in ray_folders() - job.before]
        assert len(tokens) == 2 and {path.stat().st_mode & 0o777 for path in tokens} == {0o600}
        assert {path.parent.stat().st_mode & 0o777 for path in tokens} == {0o700}
        job.wait_for_step(run_path, 2)
        scancel("--batch", "--signal=USR1", job.id)
        job.wait_for_text(f"job {job.id} requeues itself", SAVE_S)
        saved = checkpoints(run_path)
        job.wait_for_text(f"going on from runs/test/checkpoints/{saved[-1]}", START_S)
        assert job.wait(END_S) == 0, job.output + logs(cluster)
        assert job.about("Restarts") == "1"
    last = checkpoints(run_path)[-1]
    assert saved[-1] < last
    if config == SFT:
        assert last == "step_000300"
        return
    found = steps(run_path)
    assert [metrics["step"] for metrics in found] == list(range(1, 7)), job.output
    assert all(metrics["rollout/logprob_diff_mean"] < 1e-5 for metrics in found), found
    assert last == "step_000006"


@pytest.mark.soak
def test_scancel_saves_the_run_and_does_not_requeue_it(tmp_path, cluster):
    run_path = tmp_path / "runs/test"
    ranks = ("roles.actor.nodes=2", "roles.actor.cpus_per_rank=2")
    with Job(tmp_path, SFT, "name=test", *ranks, "trainer.steps=100000", options=("--time=30",)) as job:
        job.wait_for_step(run_path, 2)
        scancel(job.id)
        assert wait_until(job.has_ended, SAVE_S), job.output
        assert job.state() == "CANCELLED" and job.about("Restarts") == "0"
        assert "SIGTERM: saving the run after step" in job.output, job.output
        assert len(checkpoints(run_path)) == 1, job.output


@pytest.mark.soak
def test_a_job_of_one_node_has_no_cluster_and_goes_on_after_its_time_limit_too(tmp_path, cluster):
    run_path, few = tmp_path / "runs/test", "trainer.steps=1500"
    script = "train_single_node.sbatch"
    with Job(tmp_path, SFT, "name=test", few, options=("--time=60",), script=script) as job:
        job.wait_for_step(run_path, 2)
        scancel("--batch", "--signal=USR1", job.id)
        job.wait_for_text("going on from runs/test/checkpoints/step_", START_S)
        assert job.wait(END_S) == 0, job.output
        assert job.about("Restarts") == "1" and "Ray cluster" not in job.output, job.output
    assert checkpoints(run_path)[-1] == "step_001500"


def test_a_job_that_cannot_work_is_refused_before_ray_starts_with_all_reasons(tmp_path, cluster):
    options = ("--nodes=1", "--time=5", "--signal=B:USR1@30")
    wrong = ("roles.actor.nodes=2", "roles.actor.tensor_parallel=1", "roles.actor.gpus_per_node=1")
    with Job(tmp_path, QUICKSTART, *wrong, options=options, MEGARL_SIGNAL_LEAD="30") as job:
        assert job.wait(START_S) == 2
        assert "nodes: roles.actor.nodes is 2, but the job has 1 (n1): set sbatch --nodes=2" in job.output
        assert "--signal=B:USR1@30: 30 s before the time limit are too late for a checkpoint" in job.output
        assert "are too short for a checkpoint" in job.output
        assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("what_n2_does", [pytest.param("exec sleep 600", marks=pytest.mark.soak), "exit 3"])
def test_a_node_that_does_not_join_is_named_and_all_others_end(tmp_path, cluster, what_n2_does):
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && {what_n2_does}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    variables = {"MEGARL_VENV": str(tmp_path / "venv"), "MEGARL_JOIN_TIMEOUT_S": "20"}
    with Job(tmp_path, QUICKSTART, options=("--time=30",), **variables) as job:
        assert job.wait(START_S) != 0
        expected = {
            "exec sleep 600": "1 of 2 nodes have not joined the Ray cluster within 20 s: n2 (there are: n1)",
            "exit 3": "n2: task 1: Exited with exit code 3",
        }
        assert expected[what_n2_does] in job.output, job.output
        assert not (tmp_path / "runs/quickstart").exists()


@pytest.mark.soak
def test_the_whole_quickstart_is_cut_by_its_time_limit_and_learns_all_the_same(tmp_path, cluster):
    """Limits in minutes: the warning comes 80 to 140 s before the end of four minutes."""
    short = ("checkpoint.deadline_s=20", "cluster.start_timeout_s=45", "rollout.start_timeout_s=75")
    run_path = tmp_path / "runs/test"
    variables = {"MEGARL_SIGNAL_LEAD": "80", "MEGARL_JOIN_TIMEOUT_S": "25"}
    options = ("--time=4", "--signal=B:USR1@80")
    with Job(tmp_path, QUICKSTART, "name=test", *ON_BOTH, *short, options=options, **variables) as job:
        assert job.wait(4 * END_S) == 0, job.output
        assert int(job.about("Restarts")) >= 1, job.output
    found = steps(run_path)
    assert [metrics["step"] for metrics in found] == list(range(1, 51)), job.output
    rewards = [metrics["reward/mean"] for metrics in found]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.2, rewards
