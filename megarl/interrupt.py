"""What a run does on SIGTERM, on SIGUSR1, which is SLURM's warning, and on Ctrl-C."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megarl.config_checkpoint import CheckpointConfig
from megarl.errors import RunError

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


def ignore_warnings() -> None:
    """Before any process is started: a signal to a whole process group means the trainer, and would kill the others."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


class Interrupts:
    """Raises KeyboardInterrupt in the main thread for a signal: at once, or where the run can be saved only later, then.

    After a signal of `save_on` there are `deadline_s` seconds to save; RunError when they are over. A second signal, or
    one that is not to save, raises at once. Use as a context, inside of which no other library sets these handlers.
    """

    def __init__(self, settings: CheckpointConfig):
        self.settings = settings
        self.received: str | None = None  # the first signal
        self.may_save = True
        self._held = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        for name in NAMES:
            number = signal.Signals[name]
            if signal.getsignal(number) != signal.SIG_IGN or name == "SIGUSR1":  # a shell's background job ignores Ctrl-C
                self._before[number] = signal.signal(number, self._receive)
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._too_late)
        return self

    def __exit__(self, *exception) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around what cannot be broken off and gone on with."""
        self.hold()
        yield
        self.release()

    def hold(self) -> None:
        """From now on the state of the run is between two steps: a signal waits for `release`."""
        self._held = True

    def release(self) -> None:
        self._held = False
        if self.received is not None:
            raise KeyboardInterrupt(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        again, self.received = self.received is not None, name
        self.may_save = name in self.settings.save_on and not again
        if self.may_save:
            signal.setitimer(signal.ITIMER_REAL, self.settings.deadline_s)
        if not (self.may_save and self._held):
            raise KeyboardInterrupt(name)

    def _too_late(self, number: int, frame: FrameType | None) -> None:
        self.may_save = False
        within = f"within {self.settings.deadline_s:g} s (checkpoint.deadline_s)"
        raise RunError(f"{self.received}: no checkpoint was complete {within}; the earlier ones are as they were")
