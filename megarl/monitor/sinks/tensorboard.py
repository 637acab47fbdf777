"""Event files for TensorBoard: RUN/tensorboard, and its folder warm_start, which has steps of its own."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.monitor.run_directory import RunDirectory
    from megarl.monitor.sinks import Sinks

FLUSH_S = 10  # until what was logged can be seen


class TensorBoard:
    def __init__(self, run: "RunDirectory", sinks: "Sinks"):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = run.path / "tensorboard"
        self._new_writer = SummaryWriter
        self._writers = {"step": self._writer(self.folder, run.resumed_step + 1)}

    def _writer(self, folder: Path, first_step: int):
        """What an earlier start of the run wrote of `first_step` and later ones is hidden from then on."""
        return self._new_writer(str(folder), purge_step=first_step, flush_secs=FLUSH_S)

    def log(self, metrics: dict) -> None:
        axis = "step" if "step" in metrics else "warm_start/step"
        if axis not in self._writers:
            self._writers[axis] = self._writer(self.folder / "warm_start", 0)
        for name, value in metrics.items():
            if name != axis:
                self._writers[axis].add_scalar(name, value, metrics[axis])

    def close(self, failed: bool) -> None:
        for writer in self._writers.values():
            writer.close()
