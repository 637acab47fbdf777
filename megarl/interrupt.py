"""What a run does on SIGTERM, on SIGUSR1, which is SLURM's warning, and on Ctrl-C."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megarl.config_checkpoint import CheckpointConfig
from megarl.errors import RunError

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")
SAME_S = 1.0  # within it a signal is the one before: a batch script passes on what its processes get as well


def ignore_warnings() -> None:
    """Before any process is started: a signal to a whole process group means the trainer, and would kill the others."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Interrupts:
    """Raises KeyboardInterrupt in the main thread for a signal: at once, or then when the run can be saved.

    After a signal of `save_on` there are `deadline_s` seconds to save; RunError when they are over. The same signal
    once more, or one that is not to save, raises at once. Another one to save changes nothing: SLURM sends SIGTERM
    some time after its warning. Use as a context, inside of which no other library sets these handlers.
    """

    def __init__(self, settings: CheckpointConfig):
        self.settings = settings
        self.received: str | None = None  # the last signal that counted
        self.may_save = True
        self.waits_for = ""  # what a signal or a save waits for, in words
        self._times: dict[str, float] = {}  # when signals came first
        self._held = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        for name in NAMES:
            number = signal.Signals[name]
            # A shell has its background jobs ignore Ctrl-C.
            if signal.getsignal(number) != signal.SIG_IGN or name == "SIGUSR1":
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_late)
        return self

    def __exit__(self, *exception) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self, waits_for: str) -> Iterator[None]:
        """Around what cannot be broken off and gone on with."""
        self.hold(waits_for)
        try:
            yield
        finally:
            self._held = False
        self.release()

    def hold(self, waits_for: str) -> None:
        """From now on the state of the run is between two steps: a signal waits for `release`."""
        self._held, self.waits_for = True, waits_for

    def release(self) -> None:
        self._held = False
        if self.received is not None:
            raise KeyboardInterrupt(self.received)

    def start_deadline(self) -> None:
        """For saving, unless it runs already; it comes again if what it interrupts goes on all the same."""
        if signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, self.settings.deadline_s, self.settings.deadline_s)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        saves, is_first = name in self.settings.save_on, self.received is None
        is_repeated = now > self._times.setdefault(name, now) + SAME_S
        if saves and self.may_save and not is_first and not is_repeated:
            return
        self.received = name
        self.may_save = saves and is_first
        if self.may_save:
            self.start_deadline()
        if not (self.may_save and self._held):
            raise KeyboardInterrupt(name)

    def _too_late(self, number: int, frame: FrameType | None) -> None:
        self.may_save = False
        within = f"within {self.settings.deadline_s:g} s (checkpoint.deadline_s)"
        why = f"{self.received}: " if self.received else ""
        text = f"{why}no checkpoint was complete {within}, waiting for {self.waits_for}"
        raise RunError(f"{text}; the earlier ones are as they were")
