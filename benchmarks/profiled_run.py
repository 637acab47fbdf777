"""One profiled step of a run, from outside of it: what rank 0 of the actor computed, and where the driver was.

Two variables in the environment of the run name the step and a folder that is there.
"""

import collections
import os
import sys
import threading
import traceback
from pathlib import Path

from megarl.cluster import cluster
from megarl.cluster.workers import EngineWorker

STEP, FOLDER = "MEGARL_PROFILE_STEP", "MEGARL_PROFILE_FOLDER"
SAMPLE_S = 0.005
MAX_ROWS = 45
THREADS = ("MainThread", "rollout-client")  # those that work in a step


def install() -> None:
    """Before the run starts its ranks; Ray's workers must find this module on PYTHONPATH."""
    from megarl.trainer import Trainer

    cluster.EngineWorker = ProfiledWorker
    step_of = Trainer.step

    def step(self, number: int) -> dict[str, float]:
        if number != int(os.environ[STEP]):
            return step_of(self, number)
        self.actor._all("start_profile")
        sampler = Sampler()
        metrics = step_of(self, number)
        Path(os.environ[FOLDER], "driver.txt").write_text(sampler.stop())
        self.actor._all("write_profile")
        return metrics

    Trainer.step = step


class ProfiledWorker(EngineWorker):
    def start_profile(self) -> None:
        import torch

        if self.rank == 0:
            self.profiler = torch.profiler.profile()
            self.profiler.start()

    def write_profile(self) -> None:
        """A trace, and tables by kernel and by operator."""
        if self.rank > 0:
            return
        self.profiler.stop()
        folder, averages = Path(os.environ[FOLDER]), self.profiler.key_averages()
        keys = ("self_device_time_total", "self_cpu_time_total")
        tables = [averages.table(sort_by=key, row_limit=MAX_ROWS, max_name_column_width=90) for key in keys]
        (folder / "actor-0.txt").write_text("\n".join(tables))
        self.profiler.export_chrome_trace(str(folder / "actor-0.json.gz"))


class Sampler(threading.Thread):
    """Looks where the threads are, again and again, until `stop`."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.stacks: collections.Counter = collections.Counter()
        self.num_looks = 0
        self.start()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_S):
            self.num_looks += 1
            frames = sys._current_frames()
            for thread in threading.enumerate():
                if thread.name in THREADS and thread.ident in frames:
                    stack = tuple(place_of(frame) for frame, _ in traceback.walk_stack(frames[thread.ident]))
                    self.stacks[thread.name, stack] += 1

    def stop(self) -> str:
        """By thread and function, the share of the looks that found it there."""
        self.ended.set()
        self.join()
        lines = [f"{self.num_looks} looks, one every {SAMPLE_S * 1e3:g} ms and what it takes"]
        for title, places_of in (("with what they called", set), ("by themselves", lambda stack: stack[:1])):
            counts: collections.Counter = collections.Counter()
            for (thread, stack), count in self.stacks.items():
                counts.update({(thread, place): count for place in places_of(stack)})
            lines += ["", f"functions, {title}"]
            for (thread, place), count in counts.most_common(MAX_ROWS):
                lines.append(f"{count / self.num_looks:7.1%}  {thread:15} {place}")
        return "\n".join(lines) + "\n"


def place_of(frame) -> str:
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-3:])} {code.co_qualname}"
