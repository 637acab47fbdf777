"""What dead runs have left: found by the tag of their run (run_tag.py), and removed. Nothing else is touched."""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from megarl.cluster.connect import connect
from megarl.cluster.run_tag import RUN_ID, RunTag, start_ticks
from megarl.errors import ConfigError, RunError
from megarl.rollout.launch import KILL_S, SEGMENTS, TERMINATE_S, mapped_segments, remove_segments, wait_for

FOLDER_PREFIX = "megarl-ray-"
FOLDER_TAG = "megarl-run.json"
SERVER_SCRATCH = r"megarl-sglang-\w+"  # TMPDIR of a server (rollout/launch.py)

Jobs = dict[RunTag, bool]  # the runs that have used a Ray cluster, and whether it still serves them


@dataclass(frozen=True)
class TaggedProcess:
    pid: int
    started: int  # in clock ticks since boot
    tag: RunTag
    command: str = field(compare=False)  # processes rename themselves
    scratch: Path | None  # a folder for it and its siblings alone


def clean(run_ids: list[str], ray_address: str | None, dry_run: bool, report: Callable[[str], None]) -> None:
    """Remove what this user's dead runs have left on this machine and, with an address, in that Ray cluster.

    `run_ids`: only these; empty: all. `report` gets a line for each thing. Raises ConfigError for what is no run id,
    RunError for a run that lives, for a cluster that cannot be used, and where a process does not end.
    """
    for run_id in run_ids:
        if not re.fullmatch(RUN_ID, run_id):
            raise ConfigError(f"RUN_ID: given {run_id!r}, but it is megarl-NAME-8 hex digits, see runs/NAME/env.json")
    with connected(ray_address):
        jobs = ray_jobs() if ray_address else {}
        tags = {process.tag for process in tagged_processes()} | set(tagged_folders().values()) | set(jobs)
        if run_ids:
            tags = {tag for tag in tags if tag.run_id in run_ids}
            for tag in tags:
                if lives(tag, jobs):
                    raise RunError(f"{tag} is running: stop it first (SIGTERM), or name other runs")
        dead = dead_runs(tags, jobs)
        count = 0
        in_ray = clean_ray(dead & set(jobs), dry_run)
        for what in chain(in_ray, clean_processes(dead, dry_run), clean_folders(dead, dry_run)):
            report(f"{'would remove' if dry_run else 'removed'} {what}")
            count += 1
    for tag in tags:
        if lives(tag, jobs) is None:
            report(f"left alone: {tag}; whether it lives can be told there, or by its Ray cluster (--ray-address)")
    if not count:
        report("nothing to clean")


def lives(tag: RunTag, jobs: Jobs) -> bool | None:
    """Whether a run goes on: its trainer lives or its Ray cluster serves it; None: neither can be asked."""
    verdicts = (tag.trainer_lives(), jobs.get(tag))
    return None if verdicts == (None, None) else True in verdicts


def dead_runs(tags: set[RunTag], jobs: Jobs) -> set[RunTag]:
    """This user's runs that certainly are dead."""
    return {tag for tag in tags if tag.user == os.getuid() and lives(tag, jobs) is False}


# Ray


@contextlib.contextmanager
def connected(ray_address: str | None) -> Iterator[None]:
    if ray_address is None:
        yield
        return
    connect(ray_address, "--ray-address", namespace="megarl-clean")
    try:
        yield
    finally:
        ray.shutdown()


def ray_jobs() -> Jobs:
    """The runs that the connected Ray cluster knows of: `Cluster` puts their tags into the metadata of their jobs."""
    client = ray._private.worker.global_worker.gcs_client  # no public call tells a job's metadata
    found: Jobs = {}
    for job in client.get_all_job_info(skip_submission_job_info_field=True, skip_is_running_tasks_field=True).values():
        if tag := RunTag.read(job.config.metadata):
            found[tag] = found.get(tag, False) or not job.is_dead
    return found


def remove_dead_groups() -> list[str]:
    """Free what this user's dead runs hold in the connected cluster; what was removed."""
    jobs = ray_jobs()
    return list(clean_ray(dead_runs(set(jobs), jobs), dry_run=False))


def clean_ray(dead: set[RunTag], dry_run: bool) -> Iterator[str]:
    run_ids = {tag.run_id for tag in dead}
    if not run_ids:
        return
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name, namespace = actor["name"], actor["namespace"]
        if namespace in run_ids and run_of(name) == namespace:
            with contextlib.suppress(ValueError):  # Ray has removed it in between
                handle = ray.get_actor(name, namespace)
                if not dry_run:
                    ray.kill(handle)
                yield f"actor {name}"
    for group_id, group in placement_group_table().items():
        if group["state"] != "REMOVED" and run_of(group["name"]) in run_ids:
            if not dry_run:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id))))
            yield f"placement group {group['name']}"


def run_of(name: str) -> str | None:
    """The run id in the name of a group or actor: RUN_ID/ROLE/INDEX."""
    found = re.fullmatch(rf"({RUN_ID})/.+/\d+", name)
    return found[1] if found else None


# Processes and what they hold


def tagged_processes() -> list[TaggedProcess]:
    """This user's living processes that carry a run's tag, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            started = start_ticks(pid := int(path.name))
            if started is None or pid == os.getpid() or path.stat().st_uid != os.getuid():
                continue
            entries = (path / "environ").read_text(errors="replace").split("\0")
            command = " ".join((path / "cmdline").read_text(errors="replace").replace("\0", " ").split())[:80]
        except OSError:  # ended in between, or not ours to read
            continue
        environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
        if tag := RunTag.read(environment):
            folder = Path(environment.get("TMPDIR", ""))
            scratch = folder if re.fullmatch(SERVER_SCRATCH, folder.name) else None
            found.append(TaggedProcess(pid, started, tag, command, scratch))
    return found


def clean_processes(dead: set[RunTag], dry_run: bool) -> Iterator[str]:
    def left() -> list[TaggedProcess]:
        return [process for process in tagged_processes() if process.tag in dead]

    processes = left()
    inodes = mapped_segments([process.pid for process in processes])
    named = [path for path in Path("/dev/shm").iterdir() if path.name.startswith(SEGMENTS)]
    segments = [path for path in named if inode_of(path) in inodes]
    folders = {process.scratch for process in processes if process.scratch and process.scratch.exists()}
    if not dry_run:
        end_all(left)
        remove_segments(inodes)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    yield from (f"process {process.pid} of {process.tag.run_id}: {process.command}" for process in processes)
    yield from (f"shared memory {path}" for path in segments)
    yield from (f"folder {folder}" for folder in folders if dry_run or not folder.exists())


def end_all(left: Callable[[], list[TaggedProcess]]) -> None:
    """End all processes that `left` finds. Raises RunError where one does not end."""
    for number, timeout_s in ((signal.SIGTERM, 2 * TERMINATE_S), (signal.SIGKILL, KILL_S)):
        for process in left():
            send(process, number)
        if wait_for(lambda: not left(), timeout_s):
            return
    pids = ", ".join(str(process.pid) for process in left())
    raise RunError(f"still there {KILL_S:g} s after SIGKILL: process {pids}")


def send(process: TaggedProcess, number: signal.Signals) -> None:
    """A signal for this very process: not for a later one with its pid."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if start_ticks(process.pid) == process.started:
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)


def inode_of(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # removed in between
        return None


# Ray's folders


def make_folder(tag: RunTag) -> Path:
    """For the files of a Ray that serves one run. In /tmp: Unix sockets live below, with paths under 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{tag.pid}-", dir="/tmp"))
    (folder / FOLDER_TAG).write_text(json.dumps(tag.variables))
    return folder


def tagged_folders() -> dict[Path, RunTag]:
    """This user's folders, those of living runs included."""
    found = {}
    for file in Path("/tmp").glob(f"{FOLDER_PREFIX}*/{FOLDER_TAG}"):
        with contextlib.suppress(OSError, ValueError):  # being made or removed right now
            if file.parent.stat().st_uid == os.getuid() and (tag := RunTag.read(json.loads(file.read_text()))):
                found[file.parent] = tag
    return found


def remove_stale_folders() -> None:
    """Folders of trainers that were killed before they could remove them."""
    list(clean_folders(dead_runs(set(tagged_folders().values()), {}), dry_run=False))


def clean_folders(dead: set[RunTag], dry_run: bool) -> Iterator[str]:
    for folder, tag in tagged_folders().items():
        if tag in dead:
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
            if dry_run or not folder.exists():
                yield f"folder {folder}"
