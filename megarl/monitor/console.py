"""The console: a line per step, and a progress bar below the lines where the output is a terminal."""

from rich.console import Console as RichConsole
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("sft/loss", "loss", ".4f"),
    ("dpo/loss", "loss", ".4f"),
    ("ipo/loss", "loss", ".4f"),
    ("reward_model/loss", "loss", ".4f"),
    ("dpo/margin", "margin", ".3f"),
    ("ipo/margin", "margin", ".3f"),
    ("reward_model/accuracy", "accuracy", ".3f"),
    ("distillation/reverse_kl", "to teacher", ".4f"),
    ("kl/ref", "kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("grad_norm", "grad", ".3f"),
    ("rollout/logprob_diff_mean", "diff", ".1e"),
    ("response/length_mean", "length", ".1f"),
)  # key of the metric, what the line calls it, format


class Console:
    def __init__(self):
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
        self._progress = Progress(*columns, console=RichConsole(soft_wrap=True, highlight=False))
        self._task = None

    def __enter__(self) -> "Console":
        self._progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False)

    def loud(self, text: str) -> None:
        """A warning that nobody should miss."""
        self._progress.console.print(Panel(Text(text), title="warning", border_style="bold red"), soft_wrap=False)

    def live_paths(self, paths: dict[str, str]) -> None:
        """Which implementations a role uses: `RoleGroup.live_paths`."""
        for what, how in paths.items():
            self.line(f"  {what + ':':18} {how}")

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Start counting from `done` to `total`; replaces the bar before it."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total, completed=done)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def step(self, metrics: dict, total: int) -> None:
        text = f"step {metrics['step']:>{len(str(total))}}/{total}"
        for key, name, form in SHOWN:
            if key in metrics:  # not all are in every algorithm, or where an update was skipped
                text += f"  {name} {metrics[key]:{form}}"
        text += f"  {metrics['time/step_s']:.2f} s  {metrics['perf/tokens_per_s']:.0f} tokens/s"
        self.line(text)
        self.advance()

    def memory(self, metrics: dict) -> None:
        """What each phase took of the fullest GPU, where that was measured."""
        taken = [
            f"{key.removeprefix('memory/').removesuffix('_gpu_gb')} {gb:.1f} GB"
            for key, gb in metrics.items()
            if key.startswith("memory/")
        ]
        if taken:
            self.line(f"GPU memory at the end of each phase: {', '.join(taken)}")
