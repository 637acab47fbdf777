"""`megarl train --seeds 1,2,3`: a whole run for each seed, one after the other, and what they come to together.

Each is a process of its own, so that nothing of one run touches the next, and has the name NAME-seedK. That process is this
module as a program: `python -m megarl.many_seeds PARENT_PID train CONFIG ...`.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

from rich.table import Table

from megarl.config import Config, describe, load
from megarl.config_checks import refuse_used_run
from megarl.errors import ConfigError, RunError
from megarl.monitor.table import new_table, print_table
from megarl.rollout.launch import die_with_parent
from megarl.run_lock import refuse_in_use

if TYPE_CHECKING:
    from megarl.checkpoint.resume import Resume

LAST = 10  # steps whose metric is averaged
MAIN_METRICS = {  # by algorithm, where it is not reward/mean
    "sft": "sft/loss",
    "dpo": "dpo/accuracy",
    "ipo": "ipo/accuracy",
    "reward_model": "reward_model/accuracy",
    "distillation": "distillation/reverse_kl",
}
DONE, INTERRUPTED, NOT_BEGUN = "done", "interrupted", "not begun"


@dataclass
class Outcome:
    """Of one seed; numbers are None where there are none, and all but `wall_s` where the run is not done."""

    seed: int
    run: str
    status: str = NOT_BEGUN
    last: float | None = None  # mean of the main metric over the last steps
    validation_before: float | None = None
    validation_after: float | None = None
    wall_s: float | None = None  # of all starts of the run; None: one of them was not seen to its end
    tokens_per_s: float | None = None  # median over steps


NUMBERS = ("last", "validation_before", "validation_after", "wall_s", "tokens_per_s")


def train(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run every seed, in spite of one that fails, print a table and keep it in RUN_DIRECTORY/NAME.seeds.json; the exit code.

    `arguments`: of the whole command, from `train` on. Raises ConfigError with all that is wrong before anything is started,
    KeyboardInterrupt where a signal ended it, RunError where the run that was to be saved then could not be.
    """
    base, configs, resumes = read(options)
    if options.dry_run:
        print(describe(base), end="")
        print("#\n" + "\n".join(f"# seed {config.seed:<4} {config.run_path}" for config in configs))
        return 0
    results = base.run_path.with_name(f"{base.name}.seeds.json")
    about = {"name": base.name, "command": ["megarl", *arguments], "metric": metric_of(base)}
    walls = earlier_walls(results)
    outcomes = [Outcome(config.seed, str(config.run_path)) for config in configs]
    for outcome, resume in zip(outcomes, resumes):
        outcome.wall_s = walls.get(outcome.seed) if resume else 0.0
    try:
        with PassedOn() as signals:
            for number, (config, resume, outcome) in enumerate(zip(configs, resumes, outcomes), 1):
                title = f"megarl: seed {config.seed} ({number} of {len(configs)}): {config.run_path}"
                if resume and (why := resume.why_done(config)):
                    outcome.status = DONE
                    print(f"{title}: nothing is left to do: {why}", flush=True)
                else:
                    print(title, flush=True)
                    before, outcome.wall_s = outcome.wall_s, None
                    write(results, about, outcomes)  # should this process be killed, the time is not known
                    outcome.wall_s = before
                    run(child_arguments(arguments, options, config), outcome, signals, is_last=number == len(configs))
                if outcome.status == DONE:
                    read_metrics(config, outcome)
    finally:
        write(results, about, outcomes)
        print_table(table(about, outcomes))
        print(f"megarl: these figures are in {results}", flush=True)
    return 0 if all(outcome.status == DONE for outcome in outcomes) else 1


# What is to be done


def read(options: argparse.Namespace) -> tuple[Config, list[Config], list["Resume | None"]]:
    """(What all have, the config of each seed, the checkpoint that it goes on from). Raises ConfigError with all that is
    wrong."""
    problems: list[str] = []
    seeds = read_seeds(options.seeds, problems)
    overrides = []
    for override in options.overrides:
        if override.partition("=")[0].strip() == "seed":
            problems.append(f"override {override}: --seeds {options.seeds} gives the seeds")
        else:
            overrides.append(override)
    if options.resume not in ("auto", "never"):
        text = f"--resume {options.resume}: with --seeds each run goes on from its own checkpoint; valid: auto, never"
        problems.append(text)
    try:
        base = load(options.config, overrides)
    except ConfigError as error:
        lines = str(error).splitlines()
        problems += lines[1:] if len(lines) > 1 else lines
        raise refusal(problems) from error
    configs = [base.model_copy(update={"seed": seed, "name": f"{base.name}-seed{seed}"}) for seed in seeds]
    if base.rollout.save and len(configs) > 1:
        problems.append(f"rollout.save: given {base.rollout.save}, but a folder keeps the samples of one run")
    resumes: list[Resume | None] = [None] * len(configs)
    for index, config in enumerate(configs):
        try:
            refuse_in_use(config.run_path)
            if options.resume == "never":
                refuse_used_run(config)
            elif options.resume == "auto":
                from megarl.checkpoint import resume

                resumes[index] = resume.find(config, "auto", options.allow_config_change, lambda line: None)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise refusal(problems)
    return base, configs, resumes


def read_seeds(text: str, problems: list[str]) -> list[int]:
    """Those that can be read."""
    seeds: list[int] = []
    for part in text.split(","):
        if not re.fullmatch(r"[0-9]+", part.strip()):
            problems.append(f"--seeds {text}: {part.strip()!r} is no seed; valid: whole numbers from 0 on, as in 1,2,3")
        elif int(part) in seeds:
            problems.append(f"--seeds {text}: {int(part)} is given twice")
        else:
            seeds.append(int(part))
    return seeds


def refusal(problems: list[str]) -> ConfigError:
    header = [f"{len(problems)} problems:"] if len(problems) > 1 else []
    return ConfigError("\n".join(header + problems))


def child_arguments(arguments: list[str], options: argparse.Namespace, config: Config) -> list[str]:
    """The command of one run: all that was given, but for the seeds and the name."""
    kept, is_value = [], False
    for argument in arguments:
        is_name = argument in options.overrides and argument.partition("=")[0].strip() == "name"
        if not (is_value or is_name or argument == "--seeds" or argument.startswith("--seeds=")):
            kept.append(argument)
        is_value = argument == "--seeds"
    return [*kept, f"seed={config.seed}", f"name={config.name}"]


# Running


class PassedOn:
    """A context in which signals go to the run that is going on, once each, and are remembered."""

    def __init__(self):
        self.received: signal.Signals | None = None
        self.child: subprocess.Popen | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            # A shell has its background jobs ignore Ctrl-C.
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGUSR1:
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.child is not None:
            self.child.send_signal(number)


def run(arguments: list[str], outcome: Outcome, signals: PassedOn, is_last: bool) -> None:
    """One run to its end. Raises KeyboardInterrupt or RunError after a signal that left something to do."""
    if signals.received:
        raise KeyboardInterrupt(signals.received.name)
    start = time.monotonic()
    # In a process group of its own: a terminal would send Ctrl-C a second time, and that one breaks off the clearing up.
    command = [sys.executable, "-m", "megarl.many_seeds", str(os.getpid()), *arguments]
    signals.child = subprocess.Popen(command, process_group=0)
    if signals.received:  # by now, before there was a child
        signals.child.send_signal(signals.received)
    code = signals.child.wait()
    if outcome.wall_s is not None:
        outcome.wall_s = round(outcome.wall_s + time.monotonic() - start, 1)
    outcome.status = DONE if code == 0 else f"failed: {how_it_ended(code)}"
    if signals.received and (code != 0 or not is_last):
        if code != 0:
            outcome.status = INTERRUPTED
        if code == 1:
            raise RunError(f"{signals.received.name}: seed {outcome.seed} was not saved; its error is above")
        raise KeyboardInterrupt(signals.received.name)


def how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


# What came out


def metric_of(config: Config) -> str:
    return MAIN_METRICS.get(config.algorithm.name, "reward/mean")


def read_metrics(config: Config, outcome: Outcome) -> None:
    """The numbers of a run that is done."""
    metric = metric_of(config)
    of_validation = f"validation/{metric}" if config.algorithm.is_supervised else "validation/reward_mean"
    lines = [json.loads(line) for line in (config.run_path / "metrics.jsonl").read_text().splitlines()]
    if last := [line[metric] for line in lines if metric in line][-LAST:]:
        outcome.last = statistics.mean(last)
    if validations := [line[of_validation] for line in lines if of_validation in line]:
        outcome.validation_before, outcome.validation_after = validations[0], validations[-1]
    if speeds := [line["perf/tokens_per_s"] for line in lines if "perf/tokens_per_s" in line]:
        outcome.tokens_per_s = statistics.median(speeds)


def spread(outcomes: list[Outcome], number: str) -> tuple[float | None, float | None]:
    """(Mean, unbiased standard deviation) over the seeds that are done and have the number."""
    values = [getattr(outcome, number) for outcome in outcomes if outcome.status == DONE]
    values = [value for value in values if value is not None]
    return statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def write(file: Path, about: dict, outcomes: list[Outcome]) -> None:
    """RunError where it cannot be written."""
    spreads = {number: spread(outcomes, number) for number in NUMBERS}
    report = about | {
        "last_steps": LAST,
        "seeds": [asdict(outcome) for outcome in outcomes],
        "mean": {number: mean for number, (mean, _) in spreads.items()},
        "std": {number: std for number, (_, std) in spreads.items()},
    }
    partial = file.with_suffix(".json.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from error


def earlier_walls(file: Path) -> dict[int, float | None]:
    """Of each seed the seconds that earlier calls of this command have spent on it."""
    try:
        return {outcome["seed"]: outcome["wall_s"] for outcome in json.loads(file.read_text(encoding="utf-8"))["seeds"]}
    except FileNotFoundError:
        return {}


def table(about: dict, outcomes: list[Outcome]) -> Table:
    title = f"{about['name']}: {about['metric']} as the mean of the last {LAST} steps; ± is the standard deviation over seeds"
    shown = new_table(title, "seed", about["metric"], "validation before", "after", "wall time", "tokens/s", "")
    for outcome in outcomes:
        cells = [_cell(number, getattr(outcome, number)) for number in NUMBERS]
        shown.add_row(str(outcome.seed), *cells, outcome.status)
    done = [outcome for outcome in outcomes if outcome.status == DONE]
    shown.add_section()
    cells = [_cell(number, *spread(outcomes, number)) for number in NUMBERS]
    shown.add_row("mean", *cells, f"of {len(done)} seed{'s' * (len(done) != 1)}")
    return shown


def _cell(number: str, value: float | None, std: float | None = None) -> str:
    form, unit = {"wall_s": (".0f", " s"), "tokens_per_s": (",.0f", "")}.get(number, (".3f", ""))
    if value is None:
        return "-"
    return f"{value:{form}}" + (f" ± {std:{form}}" if std is not None else "") + unit


if __name__ == "__main__":
    # Until the trainer has a handler: a warning before the first step is no end.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    from megarl import cli

    sys.exit(cli.main(sys.argv[2:]))
