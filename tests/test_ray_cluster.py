"""launch/ray_cluster.sh: a Ray cluster by ssh, all or nothing, and training on it. ssh runs its command on this machine."""

import contextlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import ray
from end_to_end import ROOT, TAG, Run, tagged_processes, wait_until

from megarl import cli
from megarl.cluster import remote
from megarl.errors import RunError
from megarl.rollout.server import free_port

START_S, RUN_S = 240, 600
NODES = "node-a,node-b"
SFT = str(ROOT / "configs/quickstart_sft.yaml")
SHORT = ("name=test", "trainer.steps=40")
# What a test does to a host is in a file of its name: `exec sleep 600`. Options of ssh come first.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host="$1"; shift 2
[ -f "{folder}/$host" ] && . "{folder}/$host"
exec sh -c "$@"
"""
# of the cluster that the environment leads to: its nodes, as JSON
LOOK = """
import json, ray
ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
print(json.dumps({node["NodeName"]: node["Resources"]["CPU"] for node in ray.nodes() if node["Alive"]}))
"""


class Machines:
    """Where launch/ray_cluster.sh is called; use as a context, which fails if anything of a cluster is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.state = folder / "state"
        self.tag = uuid.uuid4().hex
        self.before = ray_folders()
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "MEGARL_VENV": sys.prefix,
            "HOME": str(folder),  # without a token of Ray's own
            TAG: self.tag,
        }
        (folder / "bin").mkdir()
        (folder / "hosts").mkdir()
        (folder / "bin/ssh").write_text(SSH.format(folder=folder / "hosts"))
        (folder / "bin/ssh").chmod(0o755)

    def __enter__(self) -> "Machines":
        return self

    def __exit__(self, *exception) -> None:
        if self.state.exists():
            self.call("stop")
        left = wait_until(lambda: not tagged_processes(self.tag), 30) or tagged_processes(self.tag)
        for pid in tagged_processes(self.tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        if exception == (None, None, None):
            assert left is True, f"left of the cluster: {left}"
            assert ray_folders() <= self.before
            assert not self.state.exists()

    def call(self, command: str, *arguments: str) -> subprocess.CompletedProcess:
        words = ["bash", str(ROOT / "launch/ray_cluster.sh"), command, f"--state={self.state}", *arguments]
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=START_S)

    def start(self, *arguments: str) -> subprocess.CompletedProcess:
        return self.call("start", f"--nodes={NODES}", "--num-cpus=2", "--num-gpus=0", *arguments)

    def enter(self, exports: str) -> None:
        """As a shell that evals what `start` prints."""
        self.environment |= dict(word.split("=", 1) for word in shlex.split(exports)[1:])

    def look(self) -> dict[str, float]:
        command = [sys.executable, "-c", LOOK]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def ray_folders() -> set[Path]:
    found = set()
    for file in Path("/tmp").glob("megarl-ray-*/megarl-run.json"):
        with contextlib.suppress(OSError):  # of someone else's, or just removed
            if "megarl-ray." in file.read_text():
                found.add(file.parent)
    return found


@pytest.fixture
def machines(tmp_path):
    with Machines(tmp_path) as machines:
        yield machines


def test_a_cluster_is_started_by_ssh_entered_with_its_token_and_ended(machines):
    done = machines.start()
    assert done.returncode == 0, done.stderr
    assert "2 nodes are in the Ray cluster: node-a, node-b" in done.stderr
    tokens = [machines.state / "token", *(folder / "token" for folder in ray_folders() - machines.before)]
    assert len(tokens) == 3 and {path.stat().st_mode & 0o777 for path in tokens} == {0o600}
    assert len({path.read_text() for path in tokens}) == 1
    again = machines.start()
    assert again.returncode == 2 and "has a cluster already: end it (launch/ray_cluster.sh stop)" in again.stderr
    assert machines.call("address").stdout == done.stdout
    machines.enter(done.stdout)
    assert machines.look() == {"node-a": 2.0, "node-b": 2.0}
    done = machines.call("stop")
    assert done.returncode == 0 and "ended the Ray cluster on node-a, node-b" in done.stderr, done.stderr


def test_a_host_that_does_not_answer_or_has_no_python_is_named_and_nothing_stays(machines):
    (machines.folder / "hosts/node-b").write_text(
        "echo 'ssh: connect to host node-b port 22: No route to host' >&2; exit 255\n"
    )
    done = machines.start()
    assert done.returncode == 1 and done.stdout == ""
    assert "megarl: error: node-b: ssh: connect to host node-b port 22: No route to host" in done.stderr


def test_a_host_that_hangs_is_named_within_the_deadline(machines, monkeypatch):
    (machines.folder / "hosts/node-b").write_text("exec sleep 600\n")
    monkeypatch.setenv("PATH", machines.environment["PATH"])
    cluster = {"id": "0" * 8, "nodes": ["node-b"], "python": sys.executable}
    with pytest.raises(RunError, match=r"node-b: no answer within 2 s \(--timeout-s and 30 s for ssh\)"):
        remote.on_all(cluster, ["node-b"], "end", {}, 2.0)


def test_a_port_that_is_taken_on_the_head_is_named_with_its_node(machines):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = machines.start(f"--port={port}")
    assert done.returncode == 1
    assert f"megarl: error: node-a: port {port}, of the head of the Ray cluster, is in use on this node" in done.stderr


def test_bad_input_is_refused_at_once(machines):
    for nodes in ("node-a,node-a", "node-a,,node-b"):
        done = machines.call("start", f"--nodes={nodes}")
        assert done.returncode == 2 and "wanted different hosts with commas between them" in done.stderr
    for command in ("stop", "address"):
        done = machines.call(command)
        assert done.returncode == 2 and f"--state: {machines.state} has no cluster" in done.stderr


@pytest.mark.parametrize("arguments", [["train", "--dry-run"], ["reward"], ["eval"]])
def test_the_address_of_a_cluster_is_an_option_of_each_command_that_uses_one(arguments):
    command, *options = arguments
    parsed = cli.parse([command, SFT, "--ray-address", "10.0.0.1:6379", *options])
    assert parsed.overrides[-1] == "cluster.ray_address=10.0.0.1:6379"


def test_an_address_that_is_none_is_refused(capsys):
    assert cli.main(["train", SFT, "--ray-address", "ray://host:10001", "--dry-run"]) == 2
    assert "cluster.ray_address" in capsys.readouterr().err


@pytest.mark.soak
def test_training_on_the_cluster_needs_its_address_alone(machines, monkeypatch):
    done = machines.start()
    machines.enter(done.stdout)
    for name, value in machines.environment.items():
        monkeypatch.setenv(name, value)
    ranks = ("roles.actor.nodes=2", "roles.actor.cpus_per_rank=2")
    with Run(machines.folder, SFT, *SHORT, *ranks, "--ray-address", "auto") as run:
        assert run.wait(RUN_S) == 0, run.output
    assert machines.look() == {"node-a": 2.0, "node-b": 2.0}


@pytest.fixture(scope="module")
def jobs_extra(tmp_path_factory):
    """A folder with what `ray job submit` needs and is not installed here."""
    folder, name = tmp_path_factory.mktemp("jobs"), f"ray[default]=={ray.__version__}"
    pins = ["--constraint", str(ROOT / "constraints.txt"), "--override", str(ROOT / "launch/overrides.txt")]
    missing = re.findall(r"^ \+ (\S+)$", install("--dry-run", *pins, name), re.MULTILINE)
    if missing:
        install("--target", str(folder), "--no-deps", *missing)
    return folder


def install(*arguments: str) -> str:
    """What uv says; skips the test where it cannot."""
    environment = os.environ | {"PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    command = ["uv", "pip", "install", "--python", sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START_S)
    if done.returncode != 0:
        pytest.skip(f"ray[default] cannot be installed: {done.stderr.strip()[-300:]}")
    return done.stderr


@pytest.mark.soak
def test_training_is_submitted_as_a_job_of_ray(machines, jobs_extra):
    machines.environment["PYTHONPATH"] = f"{ROOT}:{jobs_extra}"
    port = free_port("")
    done = machines.start(f"--dashboard-port={port}")
    assert done.returncode == 0, done.stderr
    machines.enter(done.stdout)
    python, toy = f"{sys.prefix}/bin/python", f"{machines.folder}/toy"
    folders = [f"run_directory={machines.folder}/runs", f"toy.folder={toy}", f"model.path={toy}/model"]
    megarl = [python, "-m", "megarl", "train", SFT, *SHORT, *folders, f"data.train={toy}/warm_start.jsonl"]
    submit = [python, "-m", "ray.scripts.scripts", "job", "submit", f"--address=http://127.0.0.1:{port}", "--"]
    command = [*submit, *megarl, "--ray-address", "auto"]
    done = subprocess.run(command, env=machines.environment, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0 and "succeeded" in done.stdout, done.stdout + done.stderr
    assert len((machines.folder / "runs/test/metrics.jsonl").read_text().splitlines()) == 40
