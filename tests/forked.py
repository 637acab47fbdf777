"""Functions in a process of their own, for what ends one: signals, kills, and limits that cannot be taken back."""

import os
import signal
import threading
from collections.abc import Callable

Say = Callable[[object], None]
LIMIT_S = 60  # then a child is killed, so that nobody waits for it any longer


class Child:
    """A fork of this process in which a function runs; `with` kills it at the end, if it is still there."""

    def __init__(self, function: Callable[[Say], None]):
        """The function is given a `say`, whose lines this process reads; what it raises is its last line."""
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                say = lambda value: os.write(writing, f"{value}\n".encode())  # noqa: E731
                try:
                    function(say)
                    code = 0
                except BaseException as error:
                    say(f"{type(error).__name__}: {error}")
            finally:
                os._exit(code)
        os.close(writing)
        self._stream = os.fdopen(reading)
        self._ended: int | None = None
        # Here: a process of several threads may not mount anything.
        self._limit = threading.Timer(LIMIT_S, self.kill, [signal.SIGKILL])
        self._limit.daemon = True
        self._limit.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception) -> None:
        self._limit.cancel()
        self.kill(signal.SIGKILL)
        self.wait()
        self._stream.close()

    def kill(self, number: int) -> None:
        if self._ended is None:
            os.kill(self.pid, number)

    def line(self) -> str:
        """The next one; "" where the child has ended."""
        return self._stream.readline().rstrip("\n")

    def rest(self) -> list[str]:
        """All lines until its end."""
        return self._stream.read().splitlines()

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        if self._ended is None:
            self._ended = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._ended


def full_disk(folder: str, megabytes: int) -> None:
    """In a child: have a file system of this size at a folder, which only the child sees. OSError where it must not."""
    import subprocess

    user, group = os.getuid(), os.getgid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    for name, text in (("uid_map", f"0 {user} 1"), ("setgroups", "deny"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder]
    if (result := subprocess.run(command, capture_output=True, text=True)).returncode:
        raise OSError(result.stderr)
