"""Where metrics go besides metrics.jsonl: each sink in a thread of its own, so that none holds up or ends a run.

A sink is a class that takes (run, sinks), has `log` and `close`, and imports its package where it is made: one that is
off costs nothing. A new one is such a class, a line in SINKS and its key in megarl/config_monitor.py.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from megarl.errors import RunError
from megarl.monitor.sinks.prometheus import Prometheus
from megarl.monitor.sinks.tensorboard import TensorBoard
from megarl.monitor.sinks.wandb import Wandb

if TYPE_CHECKING:
    from megarl.monitor.run_directory import RunDirectory

CLOSE_S = 30.0  # for all sinks together to write, or upload, what they still have
MAX_WAITING = 10_000  # lines that a sink may be behind
GPUMemory = dict[tuple[str, str, int], int]  # (role, node, GPU of the node) -> bytes that the role holds of it


class Sink(Protocol):
    def log(self, metrics: dict) -> None:
        """A line of metrics.jsonl."""

    def close(self, failed: bool) -> None:
        """What was logged is where it should be when this returns. `failed`: the run has."""


class Sinks:
    """Those that the config has. metrics.jsonl is none of them: a run ends where that cannot be written."""

    def __init__(self, run: "RunDirectory", report: Callable[[str], None]):
        """`report` gets a line where a sink fails, from another thread."""
        self.report = report
        self._source: Callable[[], GPUMemory] | None = None
        self._asking = threading.Lock()
        on = [name for name in SINKS if getattr(run.config.monitor, name) not in (None, False)]
        self._feeds = [Feed(name, lambda kind=SINKS[name]: kind(run, self), report) for name in on]

    def log(self, metrics: dict) -> None:
        for feed in self._feeds:
            feed.log(metrics)

    def close(self, failed: bool) -> None:
        """Returns after CLOSE_S at the latest."""
        deadline = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end(failed)
        for feed in self._feeds:
            feed.join(deadline)

    @contextmanager
    def watching(self, source: Callable[[], GPUMemory]) -> Iterator[None]:
        """Have a sink that tells of the GPUs ask `source`, from another thread; afterwards nobody asks it any more."""
        self._source = source
        try:
            yield
        finally:
            with self._asking:
                self._source = None

    def gpu_memory(self) -> GPUMemory:
        with self._asking:
            return self._source() if self._source else {}


class Feed:
    """The thread of one sink. Its first failure is told, and then the sink gets nothing any more."""

    def __init__(self, name: str, make: Callable[[], Sink], report: Callable[[str], None]):
        self.name = name
        self.make = make
        self.report = report
        self.has_failed = False
        self.run_failed = False
        self._waiting: queue.SimpleQueue[dict | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._work, name=f"megarl {name}", daemon=True)
        self._thread.start()

    def log(self, metrics: dict) -> None:
        if self.has_failed:
            return
        if self._waiting.qsize() >= MAX_WAITING:
            return self._fail(f"it is {MAX_WAITING} lines behind")
        self._waiting.put(metrics)

    def end(self, run_failed: bool) -> None:
        self.run_failed = run_failed
        self._waiting.put(None)

    def join(self, deadline: float) -> None:
        if not self.has_failed:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._fail(f"it was not done {CLOSE_S:g} s after the run's end")

    def _work(self) -> None:
        sink = None
        try:
            sink = self.make()
            while (metrics := self._waiting.get()) is not None and not self.has_failed:
                sink.log(metrics)
            sink.close(self.run_failed)
        except Exception as error:
            self._fail(str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
            if sink is not None:
                with suppress(Exception):  # of a sink that is broken
                    sink.close(failed=True)

    def _fail(self, why: str) -> None:
        if not self.has_failed:
            self.has_failed = True
            self.report(f"warning: monitor.{self.name}: {' '.join(why.split())}; the run goes on without it")


SINKS = {"tensorboard": TensorBoard, "wandb": Wandb, "prometheus": Prometheus}
