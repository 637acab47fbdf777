"""What a run does after Ctrl-C or SIGTERM."""

from collections.abc import Callable
from contextlib import contextmanager

from megarl.config import TrainerConfig
from megarl.monitor.console import Console


@contextmanager
def saving_on_interrupt(settings: TrainerConfig, step: int, console: Console, save: Callable[[str], None]):
    """Around a step: the weights as they are, by `save(name)`, if the config says so; a second one ends that too."""
    try:
        yield
    except KeyboardInterrupt:
        if settings.save_on_interrupt:
            console.line(f"interrupted in step {step}: saving; once more to end at once")
            save(f"interrupted_{step:06d}")
        raise
