"""What the tests of saving and resuming share: a run directory, and roles that write files as ranks do."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

from megarl.checkpoint.folder import FileRecord, record
from megarl.checkpoint.saver import LoopState, Saver
from megarl.config import Config
from megarl.errors import RunError
from megarl.monitor.run_directory import RunDirectory

METRIC = "validation/reward_mean"


def config_of(folder: Path, **sections) -> Config:
    required = {"name": "x", "run_directory": str(folder), "model": {"path": "m"}, "data": {"train": "t"}}
    return Config.model_validate(required | sections)


class Role:
    """Writes one file in a thread, not before it may. `value`: its state, which the file has."""

    def __init__(self, num_bytes: int = 1000):
        self.num_bytes = num_bytes
        self.value = 0
        self.may_write = Event()
        self.may_write.set()
        self.calls: list[str] = []
        self._pool = ThreadPoolExecutor(1)

    def start_save(self, folder: str, reference: bool) -> int:
        self.calls.append("start with reference" if reference else "start")
        content = f"{self.value} ".ljust(self.num_bytes, "x")
        self._writing = self._pool.submit(self._write, Path(folder), content)
        return self.num_bytes

    def has_written(self) -> bool:
        return self._writing.done()

    def finish_save(self) -> dict[str, FileRecord]:
        self.calls.append("finish")
        try:
            return self._writing.result()
        except OSError as error:
            raise RunError(f"actor rank 0: {error}") from error

    def close(self) -> None:
        """As a rank that is ended: it writes no more."""
        self.may_write.set()
        self._pool.shutdown()

    def _write(self, folder: Path, content: str) -> dict[str, FileRecord]:
        self.may_write.wait(60)
        (folder / "megarl.json").write_text('{"dtype": "float32", "head": "lm"}\n')
        (folder / "__0_0.distcp").write_text(content)
        return {"__0_0.distcp": record(folder / "__0_0.distcp")}


def saver_of(config: Config, lines: list[str], **roles) -> Saver:
    """Of a real run directory; by default with an actor."""
    run = RunDirectory(config, [], "cpu")
    saver = Saver(config, run, SimpleNamespace(chat_template="{{ messages }}"), SimpleNamespace(line=lines.append))
    saver.use(roles or {"actor": Role()})
    return saver


def state_of(step: int, score: float | None = None, kept=(), metric: str = METRIC) -> LoopState:
    return LoopState(step, {"best": {"metric": metric}, "is_validated": True}, list(kept), score)


def save(saver: Saver, step: int, *state) -> None:
    saver.begin(step, hold=lambda role: None)
    saver.commit(state_of(step, *state))
    saver.settle()
