"""What dead runs leave in Ray and on the machine is removed; what is of living runs, of unknown ones or untagged stays."""

import os
import re
import shutil
import subprocess
import sys
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
from end_to_end import ROOT, wait_until
from ray.util.placement_group import placement_group_table

from megarl.cluster.clean import make_folder, ray_jobs, remove_stale_folders, tagged_processes
from megarl.cluster.placement import GroupRequest, place, remove
from megarl.cluster.run_tag import RunTag, new_run_id

TRAINER = """
import os, signal, sys, time
from megarl.rollout.launch import die_with_parent
die_with_parent(os.getppid(), signal.SIGKILL)
import ray
from pathlib import Path
from ray.util.placement_group import placement_group
from megarl.cluster.cluster import Cluster
from megarl.config import Config

class Idle:
    pass

address, folder, run_id = sys.argv[1:]
config = {"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "cluster": {"ray_address": address}}
config |= {"roles": {"actor": {"cpus_per_rank": 0.25}}, "rollout": {"cpus_per_server": 0.25}}
with Cluster(Config.model_validate(config), "cpu", Path(folder), run_id) as cluster:
    options = cluster._in_bundle("actor/0", cluster._role_groups("actor")[0], 0, 0.25, 0, {})
    rank = ray.remote(Idle).options(**options).remote()
    ray.get(rank.__ray_ready__.remote())
    # Detached, so that Ray does not remove them itself.
    ray.get(placement_group([{"CPU": 0.5}], name=f"{run_id}/actor/7", lifetime="detached").ready())
    actor = ray.remote(Idle).options(name=f"{run_id}/critic/7", lifetime="detached", num_cpus=0).remote()
    ray.get(actor.__ray_ready__.remote())
    print("ready", flush=True)
    time.sleep(600)
"""
SERVER = """
import mmap, os, signal, sys, time
from megarl.rollout.launch import die_with_parent
die_with_parent(os.getppid(), signal.SIGKILL)
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "r+b") as file:
    segment = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
time.sleep(600)
"""


def start(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()


@dataclass
class Run:
    """One that holds 1 CPU in three placement groups, and has an actor where a rank would be and a detached one."""

    run_id: str
    trainer: subprocess.Popen

    @property
    def groups(self) -> set[str]:
        names = {g["name"] for g in placement_group_table().values() if g["state"] == "CREATED"}
        return {name for name in names if name.startswith(self.run_id)}

    @property
    def actors(self) -> set[str]:
        return {a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == self.run_id}

    @property
    def tag(self) -> RunTag:
        return next(tag for tag in ray_jobs() if tag.run_id == self.run_id)

    def crash(self) -> None:
        self.trainer.kill()
        assert wait_until(lambda: ray_jobs()[self.tag] is False, 30)


@pytest.fixture(scope="module")
def address():
    """Of a Ray cluster that outlives runs; this process is connected to it."""
    ray.init(
        address="local", num_cpus=3, num_gpus=0, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def runs(address, tmp_path_factory):
    """Three that live and hold all CPUs: one to leave alone, one for each test to crash."""
    run_ids = [new_run_id("x") for _ in range(3)]
    runs = [Run(run_id, start(TRAINER, address, tmp_path_factory.mktemp("logs"), run_id)) for run_id in run_ids]
    try:
        for run in runs:
            assert run.trainer.stdout.readline() == "ready\n"
            assert run.groups == {f"{run.run_id}/{name}" for name in ("actor/0", "rollout server/0", "actor/7")}
            assert run.actors == {f"{run.run_id}/{name}" for name in ("actor/0", "critic/7")}
            assert [process.tag for process in tagged_processes()].count(run.tag) == 1  # the detached one has no tag
        yield runs
    finally:
        for run in runs:
            end(run.trainer)


def test_groups_of_a_crashed_run_do_not_block_the_next(runs):
    living, crashed, _ = runs
    lines = []
    crashed.trainer.kill()
    groups = place([GroupRequest("actor", 1, 1, 0)], new_run_id("next"), 60, lines.append)
    assert crashed.groups == set() and len(living.groups) == 3
    assert f"removed placement group {crashed.run_id}/actor/7 of a dead run" in lines
    remove(groups)


class Leftovers:
    """What a run has on this machine: a server's process with shared memory and a scratch folder, and Ray's folder."""

    def __init__(self, tag: RunTag | None, scratch: Path, *options: str):
        self.tag = tag
        self.segment = Path("/dev/shm") / f"sglang_{uuid.uuid4().hex}"
        self.segment.write_bytes(b"0" * 4096)
        self.scratch = scratch
        self.scratch.mkdir()
        environment = (tag.variables if tag else {}) | {"TMPDIR": str(scratch)}
        self.process = start(SERVER, self.segment, *options, **environment)
        self.ray_folder = make_folder(tag) if tag else None

    def lines(self) -> set[str]:
        folders = {f"folder {folder}" for folder in (self.scratch, self.ray_folder)}
        return folders | {f"process {self.process.pid} of {self.tag.run_id}", f"shared memory {self.segment}"}

    def there(self) -> set[bool]:
        """{True}: all of it, {False}: nothing."""
        folders = {folder.exists() for folder in (self.scratch, self.ray_folder) if folder}
        return {self.process.poll() is None, self.segment.exists()} | folders

    def remove(self) -> None:
        end(self.process)
        self.segment.unlink(missing_ok=True)
        for folder in (self.scratch, self.ray_folder):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)


def clean(*arguments: str) -> tuple[int, set[str], str]:
    """Exit code, lines of standard output without the processes' commands, standard error."""
    command = [sys.executable, "-m", "megarl", "clean", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lines = {re.sub(r"(process \d+ of .+?): .*", r"\1", line) for line in result.stdout.splitlines()}
    return result.returncode, lines, result.stderr


def test_clean_removes_what_dead_runs_left_and_nothing_else(runs, address, tmp_path):
    living, _, crashed = runs
    reused = replace(living.tag, run_id=new_run_id("reused"), started=1)  # its trainer's pid is another process's now
    elsewhere = replace(crashed.tag, run_id=new_run_id("elsewhere"), machine="other/boot/1")
    foreign = replace(reused, run_id=new_run_id("foreign"), user=os.getuid() + 1)
    tags = {"living": living.tag, "crashed": crashed.tag, "reused": reused, "elsewhere": elsewhere, "foreign": foreign}
    left = {}
    try:
        for name, tag in (tags | {"untagged": None}).items():
            options = ["stubborn"] if name == "reused" else []
            left[name] = Leftovers(tag, tmp_path / f"megarl-sglang-{name}", *options)
        for each in left.values():
            assert each.process.stdout.readline() == "ready\n"
        crashed.crash()
        dead = {"crashed", "reused"}
        expected = set.union(*(left[name].lines() for name in dead))
        untold = f"left alone: {elsewhere}; whether it lives can be told there, or by its Ray cluster (--ray-address)"
        in_ray = {f"actor {crashed.run_id}/critic/7", f"placement group {crashed.run_id}/actor/7"}

        code, lines, error = clean("--ray-address", address, living.run_id, crashed.run_id)
        pid = living.trainer.pid
        assert (code, lines) == (1, set()) and f"{living.run_id} (trainer: process {pid} on " in error, error
        code, lines, error = clean("--dry-run", "--ray-address", address)
        assert code == 0 and {f"would remove {what}" for what in expected | in_ray} <= lines, (lines, error)
        assert untold in lines
        kept = {
            part
            for name, each in left.items()
            if name not in dead
            for part in (each.segment, each.scratch, each.ray_folder)
        }
        assert not [line for line in lines for part in kept if part and str(part) in line]
        assert all(each.there() == {True} for each in left.values()) and crashed.groups and crashed.actors

        code, lines, error = clean(
            "--ray-address", address, *(tag.run_id for tag in tags.values() if tag != living.tag)
        )
        assert (code, lines) == (0, {f"removed {what}" for what in expected | in_ray} | {untold}), (lines, error)
        assert {name for name, each in left.items() if each.there() == {False}} == dead
        assert all(each.there() == {True} for name, each in left.items() if name not in dead)
        assert wait_until(lambda: not crashed.groups and not crashed.actors, 30)
        assert len(living.groups) == 3 and len(living.actors) == 2
        assert clean("--ray-address", address, crashed.run_id) == (0, {"nothing to clean"}, "")
    finally:
        for each in left.values():
            each.remove()


def test_a_new_run_removes_only_the_ray_folders_of_dead_ones(tmp_path):
    own = RunTag.of_this_process(new_run_id("x"))
    living, dead = make_folder(own), make_folder(replace(own, started=own.started - 1))
    try:
        remove_stale_folders()
        assert living.exists() and not dead.exists()
    finally:
        shutil.rmtree(living)
        shutil.rmtree(dead, ignore_errors=True)


def test_what_is_no_run_id_is_refused():
    code, lines, error = clean("quickstart")
    assert (code, lines) == (2, set())
    assert error.startswith("megarl: error: RUN_ID: given 'quickstart', but it is megarl-NAME-8 hex digits")
