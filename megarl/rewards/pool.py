"""The processes in which rewards run. No reward can stall the loop: past its time limit its process is killed and
replaced, and of what it was to do only the call that it was at is lost."""

import contextlib
import dataclasses
import inspect
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import RunError
from megarl.rewards import find, takes_all
from megarl.rewards.worker import SEND_S, START_S, Entry, ForkServer, Item, count, too_long
from megarl.rollout.server import exit_text

if TYPE_CHECKING:
    from megarl.sample import Sample

LATE_S = 2.0  # that an event loop may be late with ending what is over its limit
LATENCY_LEVELS = (50, 95, 99)  # percentiles


@dataclass(frozen=True)
class Call:
    name: str  # of the reward
    function: str  # in megarl.rewards.REWARDS, or pkg.module:function
    options: dict


@dataclass
class Outcome:
    """What a reward says of one sample."""

    value: float | None  # None where there is an error, or where the round was given up before
    parts: dict[str, float]
    error: str | None
    seconds: float


class RewardPool:
    """Use as a context. Entering it returns at once; the first round waits for what is still to be imported.

    Calls per sample share `num_workers` processes. An async call, whose samples one event loop scores `max_concurrent`
    at a time, and a call of all samples have a process each. `timeout_s` limits a call per sample, `batch_timeout_s`
    one of all samples. `logs`: the folder for what the processes print.
    """

    def __init__(
        self,
        calls: list[Call],
        num_workers: int,
        timeout_s: float,
        batch_timeout_s: float,
        max_concurrent: int,
        logs: Path | None,
    ):
        self.logs = logs
        self.max_concurrent = max_concurrent
        self.server: ForkServer | None = None
        functions = {call.name: find(call.function) for call in calls}
        self.takes_all = {name: takes_all(function) for name, function in functions.items()}
        is_async = {name: inspect.iscoroutinefunction(function) for name, function in functions.items()}
        limit, batch_limit = ("rewards.timeout_s", timeout_s), ("rewards.batch_timeout_s", batch_timeout_s)
        shared = [call for call in calls if not (is_async[call.name] or self.takes_all[call.name])]
        queue: deque[Item] = deque()
        self.workers = [Worker(i, shared, limit, queue, num_workers) for i in range(num_workers if shared else 0)]
        for call in calls:
            if call not in shared:
                own_limit = batch_limit if self.takes_all[call.name] else limit
                self.workers.append(Worker(len(self.workers), [call], own_limit, deque(), 1, is_async[call.name]))
        self.queues = {call.name: worker.queue for worker in self.workers for call in worker.calls}

    def __enter__(self) -> "RewardPool":
        if self.workers:
            self.server = ForkServer(self.logs)
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(RunError):  # the fork server is gone, and its workers with it
            for worker in self.workers:
                if worker.connection:
                    self._stop(worker)
        if self.server:
            self.server.close()

    def run(self, samples: list["Sample"], give_up: Callable[[int], bool] | None = None) -> dict[str, list[Outcome]]:
        """What each call says of each sample, in their order; samples go without their log-probs.

        `give_up` is asked with the number of samples that have an error whenever there are some; where it says yes, all
        that is not finished is ended, and has neither value nor error. Raises RunError where a process cannot be
        started, or a reward not be loaded in it.
        """
        outcomes: dict[str, list[Outcome | None]] = {name: [None] * len(samples) for name in self.queues}
        failed: set[int] = set()
        if samples:
            self._enqueue([dataclasses.replace(sample, rollout_logprobs=None) for sample in samples])
        try:
            for worker in self.workers:
                if worker.is_ready and worker.connection.poll():  # it has nothing to say: it died since the last round
                    self._stop(worker)
            while any(worker.items or worker.queue for worker in self.workers):
                for name, place, entries, seconds in self._advance():
                    for index, entry in enumerate(entries, start=place):
                        outcomes[name][index] = self._outcome(name, samples[index], entry, seconds)
                        if isinstance(entry, str):
                            failed.add(index)
                if failed and give_up and give_up(len(failed)):
                    break
        finally:
            for worker in self.workers:
                worker.queue.clear()
                if worker.items:
                    self._stop(worker)
        return {name: [found or Outcome(None, {}, None, 0.0) for found in column] for name, column in outcomes.items()}

    def _enqueue(self, samples: list["Sample"]) -> None:
        for name, queue in self.queues.items():
            if self.takes_all[name]:
                queue.append((name, 0, samples))
            else:
                queue.extend((name, place, sample) for place, sample in enumerate(samples))

    def _outcome(self, name: str, sample: "Sample", entry: Entry, seconds: float) -> Outcome:
        if isinstance(entry, str):
            source = sample.prompt.metadata.get("source", "a prompt")
            return Outcome(None, {}, f"reward {name} of a response to {source} {entry}", seconds)
        return Outcome(*entry, None, seconds)

    def _advance(self) -> Iterator[tuple[str, int, list[Entry], float]]:
        """Give work to those that have none, wait until something happens, and say what came of it."""
        for worker in self.workers:
            if worker.queue and not worker.connection:
                self._start(worker)
            if worker.queue and worker.is_ready and not worker.items and not worker.send():
                yield from self._lose(worker, f"could not begin: its process did not take its samples in {SEND_S} s")
        living = {worker.connection: worker for worker in self.workers if worker.connection}
        deadlines = [worker.deadline for worker in living.values() if worker.deadline < math.inf]
        next_deadline = min(deadlines, default=0.0)  # none where those that had work were just lost
        for connection in wait(list(living), max(0.0, next_deadline - time.monotonic())):
            yield from self._hear(living[connection])
        for worker in self.workers:
            if worker.connection and time.monotonic() > worker.deadline:
                yield from self._lose(worker, worker.too_late)

    def _hear(self, worker: "Worker") -> Iterator[tuple[str, int, list[Entry], float]]:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._lose(worker)
            return
        if worker.is_ready:
            yield worker.receive(message)
        elif message is None:
            worker.is_ready = True
        else:
            raise RunError(message)

    def _lose(self, worker: "Worker", reason: str | None = None) -> Iterator[tuple[str, int, list[Entry], float]]:
        """End a worker that hangs, for this reason, or that has ended by itself.

        The call that it was at has failed, and all calls that were in its event loop; the others go back.
        """
        was_ready, items = worker.is_ready, list(worker.items.values())
        seconds = time.monotonic() - worker.since
        code = self._stop(worker)
        log = f", log {worker.log(self.logs)}" if self.logs else ""
        if not was_ready:
            what = f"takes longer than {START_S:g} s to start" if reason else f"did not start: {exit_text(code)}"
            raise RunError(f"a process for the rewards {', '.join(call.name for call in worker.calls)} {what}{log}")
        reason = reason or f"ended its process ({exit_text(code)}{log})"
        num_failed = len(items) if worker.is_async else 1
        worker.queue.extendleft(reversed(items[num_failed:]))
        for name, place, argument in items[:num_failed]:
            yield name, place, [reason] * count(argument), seconds

    def _start(self, worker: "Worker") -> None:
        calls = [(call.name, call.function, call.options) for call in worker.calls]
        worker.pid, worker.connection = self.server.fork()
        worker.since = time.monotonic()
        setup = {"path": sys.path, "calls": calls, "limit": worker.limit, "max_concurrent": self.max_concurrent}
        worker.connection.send(setup | {"log": worker.log(self.logs)})

    def _stop(self, worker: "Worker") -> int:
        """Kill it and what it has started, if it still lives; its exit code."""
        with contextlib.suppress(ProcessLookupError):  # it ended with the fork server
            os.killpg(worker.pid, signal.SIGKILL)
        worker.connection.close()
        worker.connection, worker.is_ready = None, False
        worker.items.clear()
        return self.server.reap(worker.pid)


class Worker:
    """One of the pool's processes as the pool sees it, and each process that replaces it."""

    def __init__(
        self,
        number: int,
        calls: list[Call],
        limit: tuple[str, float],
        queue: deque[Item],
        num_sharing: int,
        is_async: bool = False,
    ):
        self.number = number
        self.calls = calls
        self.limit = limit  # key and seconds of a call
        self.queue = queue
        self.num_sharing = num_sharing  # how many workers take from the queue
        self.is_async = is_async
        self.pid: int | None = None
        self.connection: Connection | None = None
        self.is_ready = False
        self.items: dict[tuple[str, int], Item] = {}  # it was given and has not answered; the one that it is at first
        self.since = 0.0  # when it was started, given items, or last heard of

    @property
    def deadline(self) -> float:
        """Until when something has to be heard of it."""
        if not self.is_ready:
            return self.since + START_S
        if not self.items:
            return math.inf
        return self.since + self.limit[1] + (LATE_S if self.is_async else 0.0)

    @property
    def too_late(self) -> str:
        if not self.is_async:
            return too_long(self.limit)
        return f"blocks its event loop: nothing finished in {self.limit[0]}={self.limit[1]:g} and {LATE_S:g} s"

    def send(self) -> bool:
        """Give it all that is for it, or a share of what others take from too: smaller ones towards the end. False
        where it does not take it."""
        num_items = len(self.queue) if self.is_async else math.ceil(len(self.queue) / (2 * self.num_sharing))
        items = [self.queue.popleft() for _ in range(num_items)]
        self.items = {item[:2]: item for item in items}
        self.since = time.monotonic()
        try:
            self.connection.send(items)
        except BlockingIOError:
            return False
        except OSError:  # it has died, which its connection will say
            pass
        return True

    def receive(self, message: tuple[str, int, list[Entry], float]) -> tuple[str, int, list[Entry], float]:
        self.since = time.monotonic()
        del self.items[message[:2]]
        return message

    def log(self, logs: Path | None) -> Path | None:
        return logs / f"reward-{self.number}.log" if logs else None


def latency_metrics(outcomes: list[Outcome]) -> dict[str, float]:
    """Percentiles of how long one sample's reward took, or the round's where it is for all samples."""
    if not outcomes:
        return {}
    seconds = np.percentile([outcome.seconds for outcome in outcomes], LATENCY_LEVELS)
    return {f"reward/latency_p{level}_s": float(value) for level, value in zip(LATENCY_LEVELS, seconds)}
