"""A real SLURM of two nodes on this machine, for one module of tests: installed if need be, started, and ended."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from end_to_end import ROOT, wait_until

from megarl.rollout.server import free_port

PACKAGES = ("slurm-wlm", "munge")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged")
INSTALL_S, START_S, STOP_S = 300, 60, 30
DIES_WITH_THE_TEST = """
import os, signal, sys
from megarl.rollout.launch import die_with_parent
die_with_parent(os.getppid(), signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
# cons_tres and CR_Core: a job gets CPUs; pgid: SIGTERM goes to tasks and not to their children, as under cgroups, which
# need more rights than a container has. cred_expire is what a requeued job waits for; the rest makes it start at once.
CONFIG = """\
ClusterName=megarl
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MessageTimeout=60
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=1
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def install() -> str | None:
    """Why there is no SLURM here; None: there is."""
    missing = [command for command in COMMANDS if not find(command)]
    if not missing:
        return None if os.getuid() == 0 else "SLURM's daemons are started as root"
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return f"no {', '.join(missing)}, and only root with apt-get can install {' and '.join(PACKAGES)}"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], capture_output=True, text=True, env=environment, timeout=INSTALL_S)
        if done.returncode != 0:
            return f"apt-get {' '.join(command)}: {done.stderr.strip()[-300:]}"
    return None


def find(command: str) -> str | None:
    return shutil.which(command, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextlib.contextmanager
def slurm() -> Iterator[Path]:
    """With SLURM_CONF set; the folder of its logs. Skips the test, with the reason, where SLURM cannot be installed."""
    if why := install():
        pytest.skip(why)
    with (
        contextlib.ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-slurm-", dir="/tmp")))
        for name in ("munge", "state", "n1", "n2"):
            (folder / name).mkdir()
        (folder / "munge/key").write_bytes(os.urandom(128))
        (folder / "munge/key").chmod(0o600)
        ports = [free_port("") for _ in range(3)]
        config = folder / "slurm.conf"
        config.write_text(CONFIG.format(host=socket.gethostname(), folder=folder, ports=ports))
        patch.setenv("SLURM_CONF", str(config))
        files = [f"--{what}-file={folder}/munge/{what}" for what in ("key", "pid", "log", "seed")]
        munged = ("munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *files)
        stack.enter_context(daemon(*munged, output=folder / "munged.txt"))
        assert wait_until((folder / "munge/socket").exists, START_S), logs(folder)
        stack.enter_context(daemon("slurmctld", "-D", "-f", str(config), output=folder / "slurmctld.txt"))
        for name in ("n1", "n2"):
            stack.enter_context(daemon("slurmd", "-D", "-f", str(config), "-N", name, output=folder / f"{name}.txt"))
        assert wait_until(lambda: states() == ["idle", "idle"], START_S), logs(folder)
        yield folder


@contextlib.contextmanager
def daemon(command: str, *arguments: str, output: Path) -> Iterator[None]:
    """Ends with the context, and with the test."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", DIES_WITH_THE_TEST, find(command), *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def states() -> list[str]:
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_S).stdout.split()


def logs(folder: Path) -> str:
    files = [*folder.glob("*.txt"), *folder.glob("*.log"), *folder.glob("munge/log")]
    return "\n".join(f"{file.name}:\n{file.read_text(errors='replace')[-2000:]}" for file in files)
