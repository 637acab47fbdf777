"""Child entry point of one SGLang server: `python -m megarl.rollout.launch PARENT_PID -- <sglang arguments>`.

Nothing of a server may outlive the process that supervises it, SIGKILL included. So this process is a guardian: it
starts SGLang in a child, ends it when told to (SIGTERM) or when the supervisor dies, and removes what SGLang leaves in
shared memory. Should the guardian itself be killed, the kernel kills the child too.

SGLang's own children ask to die with their parent, but only after half a minute of imports. They are started by `spawn`,
which imports this module first under the name `__mp_main__`: that closes the gap. Keep it free of heavy imports.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_VARIABLE = "MEGARL_SERVER_PARENT"  # pid of the process that starts SGLang's children
TERMINATE_S = 3.0  # between SIGTERM and SIGKILL; SGLang waits for running requests, which nobody wants any more
KILL_S = 30.0  # for the kernel to end a killed process: a GPU's memory has to be unmapped
SEGMENTS = ("sglang_", "sgl_", "sem.mp-")  # SGLang's, and multiprocessing's semaphores
POLL_S = 0.2
LOOK_S = 5.0  # between looks at the memory that the server's processes have mapped: it is known when one is killed


def main(argv: list[str]) -> None:
    role, parent_pid, arguments = (
        (argv[0], argv[1], argv[3:]) if argv[:1] == ["serve"] else ("guard", argv[0], argv[2:])
    )
    if role == "serve":
        die_with_parent(int(parent_pid), signal.SIGKILL)
        serve(arguments)
    else:
        guard(int(parent_pid), arguments)


def guard(parent_pid: int, arguments: list[str]) -> None:
    """Run SGLang to its end or ours, leave nothing of it, and end as it did."""
    told_to_stop = []
    signal.signal(signal.SIGTERM, lambda *_: told_to_stop.append(True))
    die_with_parent(parent_pid, signal.SIGTERM)
    scratch = tempfile.mkdtemp(prefix="megarl-sglang-")
    command = [sys.executable, "-m", "megarl.rollout.launch", "serve", str(os.getpid()), "--", *arguments]
    # In a process group of its own, as SGLang kills its whole group when it crashes; in our session all the same.
    child = subprocess.Popen(command, env=os.environ | {"TMPDIR": scratch}, process_group=0)
    segments: set[int] = set()
    try:
        while child.poll() is None and not told_to_stop:
            segments |= mapped_segments(living_members(os.getpid()))
            wait_for(lambda: child.poll() is not None or told_to_stop, LOOK_S)
        segments |= mapped_segments(living_members(os.getpid()))
        if child.poll() is None:
            child.terminate()
            wait_for(lambda: child.poll() is not None, TERMINATE_S)
    finally:
        kill_session(os.getpid())
        remove_segments(segments)
        shutil.rmtree(scratch, ignore_errors=True)
    code = child.wait()
    if code < 0 and not told_to_stop:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(max(0, code))


def serve(arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(arguments)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send `number` to this process when its parent ends; exit at once if that has already happened.

    The signal comes when the *thread* that started this process ends: start servers from a long-lived one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"megarl.rollout.launch: parent {parent_pid} is gone, process {os.getpid()} ends")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def kill_session(session: int) -> None:
    """SIGKILL all other members of this process's session until none is left, at most KILL_S."""

    def none_left() -> bool:
        members = set(living_members(session)) - {os.getpid()}
        for pid in members:
            with contextlib.suppress(ProcessLookupError):  # ended in between
                os.kill(pid, signal.SIGKILL)
        return not members

    wait_for(none_left, KILL_S)


def living_members(session: int) -> list[int]:
    """Pids of a session's processes that are not zombies."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # ended in between
        if int(owner) == session and state not in "ZX":
            members.append(int(path.parent.name))
    return members


def mapped_segments(pids: list[int]) -> set[int]:
    """Inodes of the files in /dev/shm that these processes have mapped."""
    inodes = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue  # ended in between
        inodes |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps)}
    return inodes


def remove_segments(inodes: set[int]) -> None:
    """Remove SGLang's segments, and semaphores of multiprocessing, whose own cleaner was killed. By inode: glibc maps a
    semaphore under another name than it gets."""
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the guardian of another server cleans up at the same time
            if path.name.startswith(SEGMENTS) and path.stat().st_ino in inodes:
                path.unlink()


def wait_for(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__mp_main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]), signal.SIGKILL)

if __name__ == "__main__":
    main(sys.argv[1:])
