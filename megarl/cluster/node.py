"""One node of a Ray cluster of our own: started, watched, and ended with nothing left of it."""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.cluster.clean import make_folder, remove_stale_folders
from megarl.cluster.cluster import OBJECT_STORE_BYTES
from megarl.cluster.run_tag import RunTag
from megarl.cluster.token_file import write_token
from megarl.errors import RunError
from megarl.logs import log_excerpt
from megarl.rollout.launch import KILL_S, wait_for
from megarl.rollout.server import free_port, port_is_free

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
STARTED = "Ray runtime started"
STOP_S = 10.0
ORPHANS_S = 10.0  # for servers whose worker has died to remove their shared memory and end
PORT_TRIES = 50
NO_DRAINING = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # at its end Ray would wait for a head that is gone
COMMON_OPTIONS = (
    f"--object-store-memory={OBJECT_STORE_BYTES}",
    "--min-worker-port=0",  # 0: a free one
    "--max-worker-port=0",
    "--node-manager-port=0",
    "--object-manager-port=0",
    "--metrics-export-port=0",
    "--dashboard-agent-listen-port=0",
    "--dashboard-agent-grpc-port=0",
    "--runtime-env-agent-port=0",
    "--include-log-monitor=false",
    "--disable-usage-stats",
)
GONE_S = 5.0  # since when the head's port is refused: the cluster has ended
SILENT_S = 60.0  # since when nothing answers there


@dataclass(frozen=True)
class RayNode:
    name: str
    process: subprocess.Popen
    output: Path
    environment: dict[str, str]  # by which a process of this machine is let into the cluster

    def check(self) -> None:
        """Raise RunError where Ray has ended by itself."""
        if (code := self.process.poll()) is not None:
            raise RunError(f"{self.name}: Ray has ended with exit code {code}:\n{self._text()}")

    def has_started(self) -> bool:
        self.check()
        return STARTED in self.output.read_text(errors="replace")

    def _text(self) -> str:
        return log_excerpt(self.output.read_text(errors="replace"))


@contextlib.contextmanager
def ray_node(
    name: str,
    run_id: str,
    address: str,
    is_head: bool,
    token: str,
    num_cpus: int | None,
    num_gpus: int | None,
    timeout_s: float,
    dashboard_port: int | None = None,
) -> Iterator[RayNode]:
    """A node of the cluster whose head is at `address`, HOST:PORT, until the context is left.

    `num_cpus`, `num_gpus`: None is what Ray finds. All other ports are free ones that the kernel gives, so that two nodes
    of one machine and other people's clusters do not meet. `dashboard_port`, on the head: serve `ray job submit` there.
    Raises RunError with the node's name where Ray does not start within `timeout_s`, on the head also where a port is
    taken.
    """
    host, _, port = address.rpartition(":")
    for number, whose in ((port, "the head of the Ray cluster"), (dashboard_port, "the dashboard")):
        if is_head and number and not port_is_free("", int(number)):
            raise RunError(f"{name}: port {number}, of {whose}, is in use on this node")
    adopt_orphans()
    remove_stale_folders()
    tag = RunTag.of_this_process(run_id)
    folder = make_folder(tag)
    node = None
    try:
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(write_token(folder, token))}
        role = _head(host, int(port), dashboard_port) if is_head else [f"--address={address}"]
        options = [*role, f"--node-name={name}", f"--temp-dir={folder / 'r'}"]  # which Ray opens to all
        options += [f"--num-cpus={num_cpus}"] if num_cpus is not None else []
        options += [f"--num-gpus={num_gpus}"] if num_gpus is not None else []
        output = folder / "ray_start.txt"
        node = RayNode(name, _start(options, environment | tag.variables, output), output, environment)
        if not wait_for(node.has_started, timeout_s):
            raise RunError(f"{name}: Ray has not started within {timeout_s:g} s:\n{node._text()}")
        yield node
    finally:
        if node:
            _end(node.process)
        shutil.rmtree(folder, ignore_errors=True)


def _head(host: str, port: int, dashboard_port: int | None) -> list[str]:
    client_port = free_port("")  # Ray has no way to leave this one out
    options = ["--head", f"--node-ip-address={host}", f"--port={port}", f"--ray-client-server-port={client_port}"]
    if dashboard_port is None:
        return [*options, "--include-dashboard=false"]
    if importlib.util.find_spec("aiohttp_cors") is None:
        raise RunError("Ray's dashboard, which serves `ray job submit`, is not installed: launch/setup_env.sh jobs")
    return [*options, "--include-dashboard=true", f"--dashboard-port={dashboard_port}"]


def _start(options: list[str], environment: dict[str, str], output: Path) -> subprocess.Popen:
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    with open(output, "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "megarl.cluster.ray_start", str(os.getpid()), *options, *COMMON_OPTIONS],
            env=inherited | environment | NO_DRAINING,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a signal to the group of a job's tasks is for us, not for Ray
        )


def adopt_orphans() -> None:
    """Processes whose parents die become children of this one, so that all that Ray has started can be ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _end(process: subprocess.Popen) -> None:
    """End Ray, and whatever it leaves of its workers."""
    process.terminate()
    wait_for(lambda: process.poll() is not None, STOP_S)
    if process.poll() is None:
        process.kill()
        process.wait()
    if wait_for(lambda: not _living_children(), ORPHANS_S):
        return
    for child in _living_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if not wait_for(lambda: not _living_children(), KILL_S):
        left = ", ".join(f"{child.pid}" for child in _living_children())
        raise RunError(f"still there {KILL_S:g} s after SIGKILL: process {left}")


def _living_children() -> list[psutil.Process]:
    """All descendants; zombies that were adopted are put to rest on the way."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return psutil.Process().children(recursive=True)


def pick_port(first: int) -> int:
    """The first port from this one on that is free on all interfaces of this machine. Raises RunError where none is."""
    for port in range(first, first + PORT_TRIES):
        if port_is_free("", port):
            return port
    ports = f"{first} to {first + PORT_TRIES - 1}"
    raise RunError(f"{socket.gethostname()}: none of the ports {ports} is free for the head of the Ray cluster")


class Head:
    """The port of the cluster's head, seen from another node."""

    def __init__(self, address: str):
        host, _, port = address.rpartition(":")
        self.place = (host.strip("[]"), int(port))
        self._answered = time.monotonic()

    def answers(self) -> bool:
        try:
            socket.create_connection(self.place, timeout=GONE_S).close()
        except OSError:
            return False
        return True

    def is_gone(self, refused_s: float = GONE_S) -> bool:
        """Whether the cluster must have ended: its machine refuses connections since then, or nothing answers at all."""
        now = time.monotonic()
        try:
            socket.create_connection(self.place, timeout=GONE_S).close()
            self._answered, limit_s = now, SILENT_S
        except ConnectionRefusedError:
            limit_s = refused_s
        except OSError:
            limit_s = SILENT_S
        return now - self._answered >= limit_s
