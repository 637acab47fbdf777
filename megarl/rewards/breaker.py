"""A circuit breaker: a service that fails again and again is left alone for a while (Nygard, Release It!, 2007)."""

import contextlib
import time
from collections.abc import Iterator

from megarl.errors import RunError


class Breaker:
    """Of one service, in one process.

    It is closed and lets calls through until so many in a row have failed. Then it is open, and calls fail at once,
    until after a time one call is let through on trial: its success closes the breaker, its failure opens it again.
    """

    def __init__(self) -> None:
        self.num_failures = 0  # calls in a row
        self.last_error = ""
        self.next_trial = 0.0  # on time.monotonic's clock
        self.in_trial = False

    @contextlib.contextmanager
    def watch(self, url: str, max_failures: int, reset_s: float) -> Iterator[None]:
        """Around a call. A RunError is a failure; a call that was cancelled says nothing of the service.

        Raises RunError while the breaker is open.
        """
        is_trial = self._admit(url, max_failures)
        try:
            yield
            self.num_failures = 0
        except RunError as error:
            self.num_failures += 1
            self.last_error = str(error)
            if is_trial or self.num_failures == max_failures:
                self.next_trial = time.monotonic() + reset_s
            raise
        finally:
            if is_trial:
                self.in_trial = False

    def _admit(self, url: str, max_failures: int) -> bool:
        """Whether the call is one on trial."""
        if self.num_failures < max_failures:
            return False
        wait_s = self.next_trial - time.monotonic()
        if wait_s > 0 or self.in_trial:
            trial = f"the next trial call is in {wait_s:.1f} s" if wait_s > 0 else "a trial call is under way"
            failures = f"{self.num_failures} calls in a row failed (breaker_failures={max_failures})"
            raise RunError(f"{url}: not called, {failures}; {trial}; the last error: {self.last_error}")
        self.in_trial = True
        return True
