"""Python code of a model in a process of its own: little time and memory, no files, no network, no other processes.

What is denied, and by what (megarl/rewards/sandbox_child.py sets it up, before the code is even compiled):
- other processes, network, writing and changing files, shared memory, privileges: by a seccomp list of allowed calls;
- reading: by Landlock all but Python's own files, the installed packages and the system's libraries. What a kernel
  without Landlock cannot deny: to open for reading what the user may read, other users' processes excepted;
- the environment and open files of the caller: the process starts without them;
- CPU time, address space, size of the output: by rlimits; wall-clock time and more than 64 threads: by the caller,
  which looks every 50 ms, as RLIMIT_NPROC counts all processes of a user and does not hold for root.
Not denied: to ask whether a file exists, its size and times. Memory that the kernel spends on a process comes on top.

Nothing that comes out is parsed, and no expected value goes in. Input and output are files in memory: a program that
does not read, or never stops to print, has nobody wait for it. Programs may use threads, but neither asyncio nor
multiprocessing, which need sockets or processes.
"""

import contextlib
import functools
import marshal
import math
import os
import platform
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from megarl.errors import RunError
from megarl.rewards import sandbox_child

MAX_OUTPUT = 16 << 20  # bytes; writing more fails in the program
MAX_FILES = 64
MAX_THREADS = 64
LOOK_S = 0.05  # between looks at the number of threads
START_S = 20.0  # for the child to lock itself in, which takes 20 ms
KILL_S = 30.0  # for the kernel to end a killed process
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")
# `-I` would ignore PYTHONHASHSEED, by which a program prints its sets in the same order each time
PYTHON = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", sandbox_child.__file__]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

Call = tuple[str, list | None, bool]  # an expression, or a function's name and arguments; whether to answer as JSON


def run_program(code: str, stdin: str, **options) -> str | None:
    """What a program prints, given this input; None if it did not end by itself, in time and with exit code 0.

    `options` and errors as those of `run`.
    """
    exit_code, output = run(code, stdin=stdin, **options)
    return output if exit_code == 0 else None


def answer_calls(code: str, calls: Sequence[Call], **options) -> list[str]:
    """The `canonical` text of the value of each call, all in one process after the code; "" where there is none: the
    call raised, its value cannot be compared, or the process came to its end before.

    `options` and errors as those of `run`.
    """
    _, output = run(code, calls=calls, **options)
    answers = output.split("\n")[:-1] + [""] * len(calls)
    return answers[: len(calls)]


def run(
    code: str,
    *,
    stdin: str = "",
    calls: Sequence[Call] | None = None,
    prelude: str = "",
    timeout_s: float,
    memory_mb: int,
    require_landlock: bool = True,
) -> tuple[int | None, str]:
    """(exit code, or None for a process that had to be killed; output). `prelude` runs before the code in its module.

    Raises RunError if the sandbox does not work here, or could not be set up: whatever the code does, it does not.
    """
    check_support(require_landlock)
    cpu_s = math.ceil(timeout_s) + 1
    limits = {"RLIMIT_CPU": cpu_s, "RLIMIT_AS": memory_mb << 20, "RLIMIT_FSIZE": MAX_OUTPUT, "RLIMIT_CORE": 0}
    job = {
        "code": code,
        "prelude": prelude,
        "calls": calls if calls is None else list(calls),
        "limits": limits | {"RLIMIT_NOFILE": MAX_FILES},
        "packages": packages(),
        "readable": readable() if landlock_version() else None,
        "parent": os.getpid(),
    }
    with (
        memory_file(marshal.dumps(job)) as job_fd,
        memory_file(stdin.encode()) as stdin_fd,
        memory_file() as stdout_fd,
    ):
        process = subprocess.Popen(
            [*PYTHON, str(job_fd)],
            stdin=stdin_fd,
            stdout=stdout_fd,
            stderr=subprocess.PIPE,
            pass_fds=[job_fd],
            env=ENVIRONMENT | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ},
            cwd="/",
            start_new_session=True,
        )
        with process.stderr:
            try:
                wait_until_ready(process)
                in_time = wait(process.pid, timeout_s)
            finally:
                process.kill()
                process.wait(KILL_S)
        return process.returncode if in_time else None, os.pread(stdout_fd, MAX_OUTPUT, 0).decode(errors="replace")


def check_support(require_landlock: bool) -> None:
    """Raises RunError where the sandbox does not work."""
    given = f"{sys.platform} {platform.machine()}"
    if given != "linux x86_64":
        raise RunError(f"sandbox: given {given}, but its list of system calls is that of linux x86_64")
    if require_landlock and not landlock_version():
        raise RunError(
            "sandbox: the kernel has no Landlock (Linux 5.13, with `landlock` in /sys/kernel/security/lsm), so model "
            "code could read all that this user can; require_landlock: false runs it all the same"
        )


@functools.cache
def landlock_version() -> int:
    return sandbox_child.landlock_version()


@functools.cache
def packages() -> list[str]:
    """The folders of installed packages, numpy's among them."""
    return list({sysconfig.get_path(name): None for name in ("purelib", "platlib")})


@functools.cache
def readable() -> list[str]:
    """The files and folders that a program can read, as far as they are here."""
    paths = [*packages(), sysconfig.get_path("stdlib"), os.path.join(sys.base_prefix, "lib"), *SYSTEM]
    return [path for path in paths if os.path.exists(path)]


@contextlib.contextmanager
def memory_file(data: bytes = b""):
    """A file descriptor at the start of this content; it is closed at the end."""
    fd = os.memfd_create("sandbox")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def wait_until_ready(process: subprocess.Popen) -> None:
    """Return when the program starts: the child then closes its stderr, having said what it has to say."""
    said, deadline = b"", time.monotonic() + START_S
    poll = select.poll()
    poll.register(process.stderr, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        if not (part := os.read(process.stderr.fileno(), 1 << 16)):
            break
        said += part
    else:
        raise RunError(f"sandbox: process {process.pid} was not ready after {START_S} s")
    if said != sandbox_child.READY:
        why = said.decode(errors="replace")[-2000:] or f"exit code {process.wait(KILL_S)}"
        raise RunError(f"sandbox: process {process.pid} failed before it came to the program: {why}")


def wait(pid: int, timeout_s: float) -> bool:
    """Whether a child ends by itself within this time, having had no more than MAX_THREADS till then."""
    deadline = time.monotonic() + timeout_s
    pidfd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left_s, LOOK_S)):
                return True
            if num_threads(pid) > MAX_THREADS:
                return False
        return False
    finally:
        os.close(pidfd)


def num_threads(pid: int) -> int:
    """Of a child that is not waited for yet: field 20 of proc_pid_stat(5)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[17])
