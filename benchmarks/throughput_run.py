"""One point of a throughput benchmark: `megarl train` as a child, followed step by step, and ended after the last."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gpu_watch
import profiled_run
from throughput_figures import PHASES, Layout, figures, layout_of, step_row
from throughput_inputs import DUMMIES, dummy_model, write_prompts

from megarl.config import Config, load
from megarl.config_file import dump
from megarl.errors import ConfigError

BENCHMARKS = Path(__file__).parent
POLL_S = 0.02
LOG_LINES = 40
END_S = 120.0  # from SIGTERM to the end of the run
CUDA_GRAPHS = {"cuda_graph_bs", "cuda_graph_max_bs", "disable_cuda_graph"}  # what decides on them
SIZES = {  # by device: tokens of a prompt and of a response, prompts of a step
    "cpu": (64, 64, 8),
    "cuda": (256, 512, 32),
}


@dataclass
class Plan:
    """What all points of a command have in common."""

    folder: Path  # for models, configs and runs
    device: str
    gpu_name: str | None
    placement: str
    warmup: int  # steps
    repeats: int  # steps
    profile: Path | None
    point_limit_s: float
    deadline: float  # of them all, by time.monotonic()
    report: Callable[[str], None]


def measure(model: str, overrides: list[str], plan: Plan, save: Callable[[dict], None]) -> dict:
    """The figures of a model and overrides of the config; `save` gets them after each measured step.

    A point that fails has `failed` with why, and the steps that it had before.
    """
    label = " ".join([model, *overrides])
    point = {"label": label, "model": model, "overrides": overrides, "steps": []}
    start = time.monotonic()
    try:
        if start > plan.deadline:
            raise Failed("the limit of time for all points was reached before")
        file, config = write_config(model, overrides, plan)
        layout = layout_of(config, plan.gpu_name)
        point |= {"gpus": layout.num_gpus, "settings": layout.settings}
        with gpu_watch.Watch(layout.num_gpus) as watch:
            follow(point, config, layout, [str(file), *overrides], plan, watch, save)
    except (ConfigError, Failed, OSError) as error:
        point["failed"] = str(error)
        if isinstance(error, Failed) and error.log_end:
            point["log_end"] = error.log_end
    point["wall_s"] = round(time.monotonic() - start, 1)
    save(point)
    return point


class Failed(Exception):
    """Why a run ended before its last step; with its log, that one's last lines are kept."""

    def __init__(self, why: str, log: Path | None = None):
        super().__init__(why)
        self.log_end = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log else []


def write_config(model: str, overrides: list[str], plan: Plan) -> tuple[Path, Config]:
    """The YAML file that the overrides are for, and what both are together. Its prompts are written too."""
    prompt, response, prompts = SIZES[plan.device]
    on_gpu, is_dummy = plan.device == "cuda", model in DUMMIES
    dtype = "bfloat16" if on_gpu else "float32"
    path = dummy_model(model, plan.folder, dtype) if is_dummy else Path(model)
    prompts_file = plan.folder / "prompts.jsonl"
    prompts_file.touch()  # the config says what is to be in it
    tree = {
        "name": f"{slug(model, overrides)}-{time.strftime('%H%M%S')}",
        "run_directory": str(plan.folder / "runs"),
        "device": plan.device,
        "placement": plan.placement,
        "model": {"path": str(path.resolve()), "dtype": dtype},
        "data": {"train": str(prompts_file), "max_prompt_tokens": prompt},
        "algorithm": {"prompts_per_step": prompts, "group_size": 8, "reward": "coin_reward:coin"},
        "roles": {"actor": {"max_tokens_per_gpu": 16384}},
        "rollout": {"sampling": {"max_new_tokens": response}, "server_args": {}},
        "trainer": {"steps": 1_000_000, "num_logged_samples": 0},  # it is ended before
        "checkpoint": {"save_on": []},
    }
    if is_dummy:
        tree["rollout"]["sampling"]["ignore_eos"] = True  # else random weights end a response now and then
    file = plan.folder / f"{tree['name']}.yaml"
    file.write_text(dump(tree))
    config = load(file, overrides)
    if config.data.train[0].path == str(prompts_file):
        number = config.algorithm.prompts_per_step * (plan.warmup + plan.repeats + 1)
        length, template = config.data.max_prompt_tokens, config.data.chat_template
        write_prompts(prompts_file, number, length, config.model.path, template, config.seed)
    if on_gpu:
        defaults = {"load_format": "dummy"} if is_dummy else {}  # the first push brings the actor's weights
        if not CUDA_GRAPHS & config.rollout.server_args.keys():
            defaults["cuda_graph_bs"] = graph_sizes(-(-config.algorithm.samples_per_step // config.rollout.servers))
        tree["rollout"]["server_args"] = defaults
        file.write_text(dump(tree))
    return file, load(file, overrides)


def slug(model: str, overrides: list[str]) -> str:
    return re.sub("[^a-z0-9]+", "-", " ".join([Path(model).name, *overrides]).lower()).strip("-")[:100]


def graph_sizes(largest: int) -> list[int]:
    """Powers of two up to the responses that a server has at once: fewer than SGLang has, so it starts sooner."""
    return [2**i for i in range(largest.bit_length()) if 2**i < largest] + [largest]


def follow(
    point: dict, config: Config, layout: Layout, arguments: list[str], plan: Plan, watch: gpu_watch.Watch, save
) -> None:
    """Add the measured steps to the point, and their figures."""
    last = plan.warmup + plan.repeats
    begun = before = first = time.monotonic()
    with contextlib.closing(steps_of(config, arguments, plan)) as steps:
        for when, metrics in steps:
            step, row = int(metrics["step"]), step_row(metrics, layout)
            if "grad_norm" not in metrics:
                raise Failed(f"step {step} updated nothing: all rewards were equal, or the update was skipped")
            kind = " (warm-up)" if step <= plan.warmup else " (profiled)" if step > last else ""
            plan.report(f"{point['label']}: step {step} of {last}{kind}: {brief(row)}")
            if step == 1:
                point["start_s"] = round(when - begun - row["step_s"], 1)
            if step <= plan.warmup:
                first = when
            elif step <= last:
                row["outside_s"] = round(when - before - row["step_s"], 4)  # metrics, guards and what else is between
                point["steps"].append(row)
                point |= {"figures": figures(point["steps"]), "during": watch.between(first, when)}
                save(point)
            before = when


def brief(row: dict) -> str:
    phases = ", ".join(f"{name} {row[f'{name}_s']:.2f}" for name in (*PHASES, "rest") if row[f"{name}_s"])
    return f"{row['step_s']:.2f} s ({phases}), {row['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU"


def steps_of(config: Config, arguments: list[str], plan: Plan) -> Iterator[tuple[float, dict]]:
    """(when it was seen, metrics) of each step up to the last one; the run has ended afterwards, whatever happens.

    Raises Failed where the run ends by itself, or a limit is reached.
    """
    log = config.run_path.parent / f"{config.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    last = plan.warmup + plan.repeats
    paths = [str(BENCHMARKS.parent), str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if plan.profile:
        last += 1
        folder = plan.profile / config.name.rpartition("-")[0]
        folder.mkdir(parents=True, exist_ok=True)
        environment |= {profiled_run.STEP: str(last), profiled_run.FOLDER: str(folder.resolve())}
    command = [sys.executable, str(BENCHMARKS / "throughput_child.py"), str(os.getpid()), *arguments]
    with open(log, "wb") as output:
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        limit = min(time.monotonic() + plan.point_limit_s, plan.deadline)
        for when, metrics in lines_of(config.run_path / "metrics.jsonl", child, limit, log):
            if "time/step_s" in metrics:
                yield when, metrics
                if metrics["step"] == last:
                    return
    finally:
        end(child)


def lines_of(file: Path, child: subprocess.Popen, limit: float, log: Path) -> Iterator[tuple[float, dict]]:
    """The file's lines as they are written."""
    read, ended = 0, False
    while True:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        for line in whole[read:]:
            yield time.monotonic(), json.loads(line)
        read = len(whole)
        if ended:
            raise Failed(f"the run ended with exit code {child.returncode}: {last_error(log)}", log)
        if time.monotonic() > limit:
            raise Failed(f"the limit of time was reached; its last line: {last_error(log)}", log)
        ended = child.poll() is not None
        time.sleep(POLL_S)


def last_error(log: Path) -> str:
    """What megarl said last, from its "error" on; else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if "error" in line.lower()]
    starts = [index for index in errors if lines[index].startswith("megarl: error:")] or errors or [len(lines) - 1]
    return "; ".join(lines[max(starts[-1], 0) :][:3])[:500] or "it printed nothing"


def end(child: subprocess.Popen) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
