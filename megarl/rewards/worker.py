"""A pool's processes: the fork server, child entry point `python -m megarl.rewards.worker SOCKET`, and its workers.

The fork server imports torch once and then forks a worker for each connection that it is sent, in milliseconds.
multiprocessing's own will not do: its children keep it alive when the trainer is killed, each of them runs the
trainer's main module again, and it cannot be ended.
"""

import asyncio
import functools
import inspect
import math
import numbers
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import RunError
from megarl.logs import log_end
from megarl.rewards import find
from megarl.rollout.launch import die_with_parent
from megarl.rollout.server import exit_text

if TYPE_CHECKING:
    from megarl.sample import Sample

START_S = 120.0  # for torch and what the rewards' modules import, on a busy machine
SEND_S = 10  # for an idle worker to take samples: a stopped one must not stop the trainer
MAX_MESSAGE = 64  # bytes of a request to the fork server, and of its answer
MAX_TEXT = 1000  # characters of what a reward raised or returned, in an error

Item = tuple[str, int, "Sample | list[Sample]"]  # a call: name of the reward, place of the first sample, argument
Entry = tuple[float, dict[str, float]] | str  # the value of a reward and its parts, or why there is none


class ForkServer:
    """The process that forks workers, as the pool sees it. It sees no GPU, and ends with this one."""

    def __init__(self, logs: Path | None):
        self.log = logs / "reward.log" if logs else None
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(START_S)
        command = [sys.executable, "-m", "megarl.rewards.worker", str(theirs.fileno())]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        output = open(self.log, "ab") if self.log else None
        with theirs:  # in a process group of its own: Ctrl-C is this process's matter
            self.process = subprocess.Popen(
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )
        if output:
            output.close()

    def fork(self) -> tuple[int, Connection]:
        """A new worker: its pid, and the connection to it."""
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_S, 0))
        with theirs:
            return int(self._ask(b"fork", [theirs.fileno()])), ours

    def reap(self, pid: int) -> int:
        """The exit code of a worker that has died or was killed."""
        return int(self._ask(str(pid).encode()))

    def _ask(self, request: bytes, handles: Sequence[int] = ()) -> bytes:
        who = f"the process that forks the rewards' workers, {self.process.pid},"
        try:
            socket.send_fds(self.control, [request], handles)
            answer = self.control.recv(MAX_MESSAGE)
        except TimeoutError as error:
            raise RunError(f"{who} did not answer in {START_S:g} s") from error
        except OSError:  # nobody is at the other end, as where the answer is empty
            answer = b""
        if not answer:
            log = f"; {log_end(self.log, socket.gethostname())}" if self.log else ""
            raise RunError(f"{who} ended: {exit_text(self.process.wait(START_S))}{log}")
        return answer

    def close(self) -> None:
        self.control.close()
        self.process.kill()
        self.process.wait(START_S)


def main(control: socket.socket) -> None:
    """Fork a worker per connection received and answer with its pid; answer a pid with the exit code of that worker.

    Ends with the process at the other end, the workers with this one, and with them what they have started.
    """
    import megarl.sample  # noqa: F401  torch, for all workers

    pid, workers = os.getpid(), set()
    while True:
        request, handles, _, _ = socket.recv_fds(control, MAX_MESSAGE, 1)
        if handles:
            child = os.fork()
            if child == 0:
                die_with_parent(pid, signal.SIGKILL)
                control.close()
                os.set_inheritable(handles[0], False)
                os.dup(handles[0])  # the other end learns of this process's end when it has an exit code, not before
                connection = Connection(handles[0])
                return work(connection, **connection.recv())
            os.setpgid(child, child)  # so that what it starts can be killed with it
            os.close(handles[0])
            workers.add(child)
            answer = child
        elif request:
            _, status = os.waitpid(int(request), 0)
            workers.remove(int(request))
            answer = os.waitstatus_to_exitcode(status)
        else:
            for worker in workers:
                os.killpg(worker, signal.SIGKILL)
            return None
        control.send(str(answer).encode())


def work(
    connection: Connection,
    path: list[str],
    calls: list[tuple[str, str, dict]],
    limit: tuple[str, float],
    max_concurrent: int,
    log: Path | None,
) -> None:
    """Answer a list of items with one message for each, (name, place, entries of its samples, seconds), as they finish.

    `path`: where to import from; `calls`: (name, function, options); `limit`: key and seconds for each async call. Says
    first None, or what cannot be loaded.
    """
    if log:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    sys.path[:] = path
    functions = {}
    for name, function, options in calls:
        try:
            functions[name] = functools.partial(find(function), **options)
        except Exception as error:  # the function's module is anyone's code and may raise anything
            return connection.send(f"reward {name} cannot be loaded: {reason_of(error)}")
    connection.send(None)
    with asyncio.Runner() as runner:  # one event loop for all rounds, so that a reward may keep its HTTP session
        while True:
            try:
                items = connection.recv()
            except EOFError:
                return None
            if inspect.iscoroutinefunction(functions[items[0][0]]):
                runner.run(score_all(functions, items, limit, max_concurrent, connection.send))
            else:
                for name, place, argument in items:
                    connection.send((name, place, *score(functions[name], argument)))


def score(function: Callable, argument: "Sample | list[Sample]") -> tuple[list[Entry], float]:
    """The entry of each sample, and how long it took."""
    start = time.perf_counter()
    try:
        entries = entries_of(function(argument), argument)
    except Exception as error:  # a reward is anyone's code and may raise anything
        entries = [reason_of(error)] * count(argument)
    return entries, time.perf_counter() - start


async def score_all(
    functions: dict[str, Callable], items: list[Item], limit: tuple[str, float], max_concurrent: int, send: Callable
) -> None:
    gate = asyncio.Semaphore(max_concurrent)

    async def score_one(name: str, place: int, argument: "Sample | list[Sample]") -> None:
        async with gate:
            send((name, place, *await score_async(functions[name], argument, limit)))

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(score_one(*item))


async def score_async(
    function: Callable, argument: "Sample | list[Sample]", limit: tuple[str, float]
) -> tuple[list[Entry], float]:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(limit[1]) as timeout:
            entries = entries_of(await function(argument), argument)
    except (Exception, asyncio.CancelledError) as error:  # as above; nobody else cancels it
        entries = [reason_of(error)] * count(argument)
    if timeout.expired():
        entries = [too_long(limit)] * count(argument)
    return entries, time.perf_counter() - start


def entries_of(result: Any, argument: "Sample | list[Sample]") -> list[Entry]:
    if not isinstance(argument, list):
        return [entry_of(result)]
    if not isinstance(result, list):
        return [f"returned {shown(result)}: wanted a list with a value for each sample"] * len(argument)
    if len(result) != len(argument):
        return [f"returned {len(result)} values for {len(argument)} samples"] * len(argument)
    return [entry_of(value) for value in result]


def entry_of(value: Any) -> Entry:
    """A finite number, or of named ones their sum or the one named reward, which is then no part."""
    parts = value if isinstance(value, dict) else {"reward": value}
    are_numbers = all(isinstance(part, numbers.Real) and math.isfinite(part) for part in parts.values())
    if not parts or not are_numbers or not all(isinstance(name, str) for name in parts):
        return f"returned {shown(value)}: wanted a finite number, or a dict of named ones"
    parts = {name: float(part) for name, part in parts.items()}
    if "reward" in parts:
        return parts.pop("reward"), parts
    return math.fsum(parts.values()), parts


def count(argument: "Sample | list[Sample]") -> int:
    return len(argument) if isinstance(argument, list) else 1


def too_long(limit: tuple[str, float]) -> str:
    key, seconds = limit
    return f"took longer than {key}={seconds:g}"


def reason_of(error: BaseException) -> str:
    """For the user; the log gets the traceback."""
    traceback.print_exception(error)
    text = str(error)[:MAX_TEXT].encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be printed
    return f"raised {type(error).__name__}: {text}"


def shown(value: Any) -> str:
    return repr(value)[:MAX_TEXT]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
