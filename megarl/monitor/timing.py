"""How long the phases of a step take."""

import time
from contextlib import contextmanager


@contextmanager
def timed(times: dict[str, float], name: str):
    """Adds the seconds of its body to `times[name]`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start
