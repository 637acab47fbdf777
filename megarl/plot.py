"""`megarl plot RUN ... --out FILE`: the curves of runs in one picture. Runs NAME-seed1, NAME-seed2, ... are one curve, their
mean, with a band from the lowest to the highest of them."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLUMNS = 3
DECADE = 10.0  # a quantity that spans more is drawn on a logarithmic axis
SMALL_PHASE = 0.01  # of the time: such a phase is part of "other"
WIDTH, ROW_HEIGHT, DPI = 9.0, 2.15, 160  # inches, inches, pixels per inch of a PNG
# Colours that the colour-blind tell apart: M. Okabe and K. Ito, "Color Universal Design", 2008.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442"
)  # fmt: skip
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, "#000000")  # of runs; further ones are dashed
DASHES = ("-", "--", ":")
PHASES = {  # of a step, in its order
    "generate": BLUE,
    "reward": YELLOW,
    "logprob": SKY,
    "reference": PURPLE,
    "update": GREEN,
    "save": "#7A4B1F",
    "sync": VERMILION,
    "offload": ORANGE,
    "other": "#BBBBBB",
}
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.5,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "megarl",
}


@dataclass(frozen=True)
class Panel:
    title: str
    key: str  # of a line of metrics.jsonl
    validation: str | None = None
    may_span_decades: bool = False


PREFERENCES = ("dpo", "ipo", "reward_model")
PANELS = (  # the first one that a run has is the largest
    Panel("mean reward", "reward/mean", "validation/reward_mean"),
    Panel("loss", "sft/loss", "validation/sft/loss"),
    *(Panel("pairs in the right order", f"{name}/accuracy", f"validation/{name}/accuracy") for name in PREFERENCES),
    *(Panel("loss", f"{name}/loss", f"validation/{name}/loss") for name in PREFERENCES),
    *(Panel("margin of the pairs", f"{name}/margin", f"validation/{name}/margin") for name in PREFERENCES),
    Panel("KL to the teacher (nats per token)", "distillation/reverse_kl"),
    Panel("KL to the reference (nats per token)", "kl/ref"),
    Panel("entropy (nats per token)", "entropy"),
    Panel("response length (tokens)", "response/length_mean"),
    Panel("gradient norm", "grad_norm"),
    Panel("log-prob difference, trainer to server", "rollout/logprob_diff_mean", may_span_decades=True),
)


@dataclass(frozen=True)
class Curve:
    """One run, or the runs of several seeds: the lines of their metrics.jsonl."""

    label: str
    runs: list[list[dict]]

    def has(self, key: str) -> bool:
        """In a step that all runs have."""
        return len(self.values(key)[0]) > 0

    def values(self, key: str, smooth: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """(Steps [S] that all runs have, values [runs, S]), each the mean of the last `smooth` ones."""
        by_step = [{line["step"]: line[key] for line in lines if key in line} for lines in self.runs]
        steps = sorted(set.intersection(*map(set, by_step)))
        values_RS = np.array([[of_run[step] for step in steps] for of_run in by_step], dtype=float)
        return np.array(steps), trailing_mean(values_RS, smooth)

    def phases(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(Steps [S], seconds [S] of each phase as the mean over the runs); no phases where the runs have none."""
        names = [key[5:-2] for lines in self.runs for line in lines for key in line if re.fullmatch(r"time/\w+_s", key)]
        names = [name for name in dict.fromkeys(names) if name != "step"]
        if not names or not self.has("time/step_s"):
            return np.array([]), {}
        # A phase that is not in a step took none of its time.
        zeros = {f"time/{name}_s": 0.0 for name in names}
        filled = Curve(self.label, [[zeros | line for line in lines if "time/step_s" in line] for lines in self.runs])
        steps, totals_RS = filled.values("time/step_s")
        seconds = {name: filled.values(f"time/{name}_s")[1].mean(0) for name in sorted(names, key=_order)}
        total_S = totals_RS.mean(0)
        large = {name: each for name, each in seconds.items() if each.sum() > SMALL_PHASE * total_S.sum()}
        return steps, large | {"other": np.maximum(total_S - sum(large.values()), 0.0)}


def run(runs: list[str], out: str, smooth: int, title: str | None, print_line: Callable[[str], None] = print) -> int:
    """Draw run directories into a file, as the mean of `smooth` steps. Raises ConfigError with all that is wrong."""
    file, problems = Path(out), []
    if file.suffix not in SUFFIXES:
        problems.append(f"--out {file}: the suffix says what it is to be; valid: {', '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        problems.append(f"--out {file}: no such folder: {file.parent}")
    if smooth < 1:
        problems.append(f"--smooth {smooth}: wanted 1 or more steps")
    curves = read_curves([Path(path) for path in runs], problems)
    if problems:
        header = [f"{len(problems)} problems:"] if len(problems) > 1 else []
        raise ConfigError("\n".join(header + problems))
    title = title or (curves[0].label if len(curves) == 1 else "")
    try:
        save(draw(curves, smooth, title), file)
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror}") from error
    print_line(f"megarl: {file}: {', '.join(describe(curve) for curve in curves)}")
    return 0


# What is drawn


def read_curves(runs: list[Path], problems: list[str]) -> list[Curve]:
    """In the order of the arguments; runs that cannot be drawn go to `problems`."""
    groups: dict[str, dict[str, list[dict]]] = {}  # place without the seed -> run -> lines
    for path in runs:
        name = path.resolve().name
        seed = re.fullmatch(r"(.+)-seed\d+", name)
        try:
            lines = read_lines(path)
        except ConfigError as error:
            problems.append(str(error))
            continue
        group = groups.setdefault(str(path.resolve().with_name(seed[1] if seed else name)), {})
        if name in group:
            problems.append(f"{path} is given twice")
        group[name] = lines
    names = [Path(place).name for place in groups]
    curves = []
    for place, group in groups.items():
        name = Path(place).name
        curves.append(Curve(name if names.count(name) == 1 else place, list(group.values())))
        if not any(curves[-1].has(panel.key) for panel in PANELS):
            problems.append(f"{', '.join(group)}: seeds of one name without a step that all of them have")
    return curves


def read_lines(path: Path) -> list[dict]:
    """The lines of steps and of validations; a last line that a living run has not finished is left out."""
    file = path / "metrics.jsonl"
    if not file.is_file():
        raise ConfigError(f"{path}: {'no metrics.jsonl in it' if path.is_dir() else 'no such run directory'}")
    lines = []
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        try:
            if text.endswith(b"\n") and "step" in (line := json.loads(text)):
                lines.append(line)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: not valid JSON") from error
    if not any(panel.key in line for line in lines for panel in PANELS):
        raise ConfigError(f"{file}: no step in it yet")
    return lines


def trailing_mean(values_RS: np.ndarray, window: int) -> np.ndarray:
    """The mean of the last `window` values up to each; of those that there are at the beginning."""
    sums_RS = np.cumsum(values_RS, axis=1)
    sums_RS[:, window:] -= sums_RS[:, :-window].copy()
    return sums_RS / np.minimum(np.arange(1, values_RS.shape[1] + 1), window)


def describe(curve: Curve) -> str:
    return curve.label + (f" ({len(curve.runs)} seeds)" if len(curve.runs) > 1 else "")


# Drawing


def draw(curves: list[Curve], smooth: int = 1, title: str = "") -> "Figure":
    import matplotlib
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(curve.has(panel.key) for curve in curves)]
    with_phases = [curve for curve in curves if curve.phases()[1]]
    spans = layout(len(panels), bool(with_phases))
    rows = spans[-1][0] + 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * rows + 0.45), layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06, wspace=0.03, hspace=0.04)
        grid = figure.add_gridspec(rows, COLUMNS)
        axes = [figure.add_subplot(grid[row, first : first + width]) for row, first, width in spans]
        for panel, of_panel in zip(panels, axes):
            draw_panel(of_panel, panel, curves, smooth)
        if with_phases:
            draw_phases(axes[-1], with_phases, is_alone=len(curves) == 1)
        steps = [line["step"] for curve in curves for lines in curve.runs for line in lines]
        for of_panel, (row, _, _) in zip(axes, spans):
            if not of_panel.get_xlabel():
                of_panel.set_xlabel("step" if row == rows - 1 else "")
                of_panel.set_xlim(min(steps) - 0.02 * max(steps), 1.02 * max(steps))
        add_legends(figure, axes[0], panels[0], curves, smooth)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    return figure


def layout(num_panels: int, has_phases: bool) -> list[tuple[int, int, int]]:
    """(Row, first column, columns) of each panel, then of the phases: the first is two wide, the last fills its row."""
    spans, row, column = [], 0, 0
    for index in range(num_panels + has_phases):
        width = 2 if index == 0 else 1
        if column + width > COLUMNS:
            row, column = row + 1, 0
        spans.append((row, column, width))
        column += width
    row, column, _ = spans[-1]
    spans[-1] = (row, column, COLUMNS - column)
    return spans


def draw_panel(axes: "Axes", panel: Panel, curves: list[Curve], smooth: int) -> None:
    """Of each curve a line (its label: the curve's, then the key), a band over seeds, and points of validations."""
    axes.set_title(panel.title)
    for index, curve in enumerate(curves):
        if not curve.has(panel.key):
            continue
        color, dashes = COLORS[index % len(COLORS)], DASHES[index // len(COLORS) % len(DASHES)]
        steps, values_RS = curve.values(panel.key, smooth)
        if len(curve.runs) > 1:
            axes.fill_between(steps, values_RS.min(0), values_RS.max(0), color=color, alpha=0.2, linewidth=0)
        elif smooth > 1:
            axes.plot(steps, curve.values(panel.key)[1][0], color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, values_RS.mean(0), dashes, color=color, label=f"{curve.label} {panel.key}")
        if panel.validation and curve.has(panel.validation):
            steps, values_RS = curve.values(panel.validation)
            means = values_RS.mean(0)
            errors = [means - values_RS.min(0), values_RS.max(0) - means] if len(curve.runs) > 1 else None
            style = _held_out(color, len(curves) == 1) | ({} if len(steps) > 2 else {"linestyle": "none"})
            axes.errorbar(steps, means, errors, label=f"{curve.label} {panel.validation}", **style)
    values = np.concatenate([line.get_ydata() for line in axes.get_lines()])
    if panel.may_span_decades and 0 < DECADE * values.min() < values.max():
        axes.set_yscale("log")
    elif panel.may_span_decades:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    elif panel.key == "reward/mean" and 0 <= values.min() and values.max() <= 1:
        axes.set_ylim(-0.03, 1.05)


def draw_phases(axes: "Axes", curves: list[Curve], is_alone: bool) -> None:
    """Of one curve stacked areas over the steps, of several a bar each with means over the steps."""
    phases = [curve.phases() for curve in curves]
    names = sorted({name for _, seconds in phases for name in seconds}, key=_order)
    axes.set_title("seconds per step" + (", mean" if not is_alone else ""))
    colors = [PHASES.get(name, "#777777") for name in names]
    if is_alone:
        steps, seconds = phases[0]
        axes.stackplot(steps, [seconds[name] for name in names], labels=names, colors=colors, linewidth=0)
    else:
        left = np.zeros(len(curves))
        for name, color in zip(names, colors):
            means = np.array([seconds[name].mean() if name in seconds else 0.0 for _, seconds in phases])
            axes.barh([curve.label for curve in curves], means, left=left, label=name, color=color, height=0.6)
            left += means
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")
    above = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.99), "borderaxespad": 0.0}
    axes.legend(**above, ncols=len(names), handlelength=0.9, handletextpad=0.4, columnspacing=1.0)


def add_legends(figure: "Figure", axes: "Axes", panel: Panel, curves: list[Curve], smooth: int) -> None:
    """What lines, bands and points are, in the first panel; above all panels which colour is which curve."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    is_alone = len(curves) == 1
    color, most = (COLORS[0] if is_alone else "#555555"), max(len(curve.runs) for curve in curves)
    text = "training" if most == 1 else f"training, mean of {most} seeds" if is_alone else "training, mean over seeds"
    text += f", over the last {smooth} steps" * (smooth > 1)
    handles = [Line2D([], [], color=color, label=text)]
    if most > 1:
        handles.append(Patch(color=color, alpha=0.2, linewidth=0, label="lowest to highest seed"))
    elif smooth > 1:
        handles.append(Line2D([], [], color=color, alpha=0.3, linewidth=0.8, label="each step"))
    if panel.validation and any(curve.has(panel.validation) for curve in curves):
        handles.append(Line2D([], [], label="held out", **_held_out(color, is_alone) | {"linestyle": "none"}))
    axes.legend(handles=handles, loc="best")
    if not is_alone:
        lines = [_example(index, curve) for index, curve in enumerate(curves)]
        figure.legend(handles=lines, loc="outside upper right", ncols=min(4, len(lines)), fontsize=8)


def save(figure: "Figure", out: Path) -> None:
    import matplotlib
    from PIL import Image

    with matplotlib.rc_context(STYLE):
        if out.suffix != ".png":
            stable = {"Date": None} if out.suffix == ".svg" else {"CreationDate": None}  # equal runs, equal files
            figure.savefig(out, metadata=stable)
            return
        pixels = io.BytesIO()
        figure.savefig(pixels, dpi=DPI)
    # A palette of the few colours that there are: a third of the size.
    Image.open(pixels).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def _example(index: int, curve: Curve):
    from matplotlib.lines import Line2D

    dashes = DASHES[index // len(COLORS) % len(DASHES)]
    return Line2D([], [], color=COLORS[index % len(COLORS)], linestyle=dashes, label=describe(curve))


def _held_out(color: str, is_alone: bool) -> dict:
    color = VERMILION if is_alone else color
    return {"color": color, "marker": "o", "markersize": 4, "linestyle": ":", "linewidth": 1.0}


def _order(phase: str) -> int:
    """Of a step; one that is not known here comes before the rest of the time."""
    names = list(PHASES)
    return names.index(phase if phase in PHASES else "other")
