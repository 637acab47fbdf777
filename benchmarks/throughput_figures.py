"""From the metrics of a run's steps to figures, and how two sets of them compare. No GPU, no process, no file."""

import math
from dataclasses import dataclass

import numpy as np

from megarl.config import Config
from megarl.config_describe import needs
from megarl.engine.hf.flops import forward_flops
from megarl.engine.hf.shape import ModelShape

PHASES = ("generate", "reward", "logprob", "update", "sync", "offload")  # of time/PHASE_s; the others are the rest
PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989, "NVIDIA A100": 312}  # dense bfloat16; names begin so
JUDGED_SHARE = 0.05  # a phase with less of the step's time is not judged
NUM_DRAWS = 10_000


@dataclass(frozen=True)
class Layout:
    """What turns a step's times into rates. On CPU a process of a role counts as a GPU."""

    num_gpus: int
    actor_gpus: int
    server_gpus: int
    shape: ModelShape
    samples_per_step: int
    group_size: int
    training_forwards: int  # what training computes of a sample in a step, in forward passes
    scoring_forwards: int
    peak_tflops: float | None
    settings: dict  # what a reader wants to know of the config


def layout_of(config: Config, gpu_name: str | None) -> Layout:
    algorithm, actor, rollout = config.algorithm, config.roles.actor, config.rollout
    peaks = [peak for name, peak in PEAK_TFLOPS.items() if gpu_name and gpu_name.startswith(name)]
    scores = algorithm.old_logprobs == "recompute"
    return Layout(
        num_gpus=needs(config, gpus_per_rank=1)[-1][2],
        actor_gpus=actor.world_size,
        server_gpus=rollout.servers * rollout.tensor_parallel,
        shape=ModelShape.read(config.model.path),
        samples_per_step=algorithm.samples_per_step,
        group_size=algorithm.group_size,
        # backward: the gradients by the inputs, and by the weights where these are trained
        training_forwards=(2 if actor.lora else 3) * algorithm.epochs,
        scoring_forwards=scores + config.roles.reference.enabled,
        peak_tflops=peaks[0] if peaks else None,
        settings={
            "placement": config.placement,
            "dtype": config.model.dtype,
            "prompts_per_step": algorithm.prompts_per_step,
            "group_size": algorithm.group_size,
            "max_prompt_tokens": config.data.max_prompt_tokens,
            "max_new_tokens": rollout.sampling.max_new_tokens,
            "updates_per_step": algorithm.samples_per_step // algorithm.samples_per_update * algorithm.epochs,
            "reference": config.roles.reference.enabled,
            "actor": actor.sizes,
            "servers": f"{rollout.servers} x {rollout.tensor_parallel}",
            "max_tokens_per_gpu": actor.max_tokens_per_gpu,
            "recompute": actor.recompute,
            "bucket_mb": config.sync.bucket_mb,
        },
    )


def step_row(metrics: dict[str, float], layout: Layout) -> dict[str, float]:
    """A step's seconds by phase, and its rates. Tokens are those that were, not those asked for; FLOPs are counted at
    the mean length of the step's samples."""
    seconds = {name: metrics.get(f"time/{name}_s", 0.0) for name in PHASES}
    step_s = metrics["time/step_s"]
    row = {"step_s": step_s} | {f"{name}_s": value for name, value in seconds.items()}
    row["rest_s"] = step_s - sum(seconds.values())
    groups = metrics.get("dynamic_sampling/generated_groups")
    num_generated = layout.samples_per_step if groups is None else groups * layout.group_size
    tokens = metrics["perf/tokens_per_s"] * step_s
    response_tokens = metrics["response/length_mean"] * num_generated
    row["tokens"], row["response_tokens"] = round(tokens), round(response_tokens)
    row["tokens_per_s_per_gpu"] = tokens / step_s / layout.num_gpus
    row["response_tokens_per_s_per_gpu"] = response_tokens / step_s / layout.num_gpus
    row["generate_tokens_per_s_per_gpu"] = response_tokens / seconds["generate"] / layout.server_gpus
    tflop = layout.samples_per_step * forward_flops(layout.shape, tokens / num_generated) / layout.actor_gpus / 1e12
    for name, forwards in (("update", layout.training_forwards), ("logprob", layout.scoring_forwards)):
        if forwards and seconds[name]:
            row[f"{name}_tflops_per_gpu"] = tflop * forwards / seconds[name]
            if layout.peak_tflops:
                row[f"{name}_mfu"] = row[f"{name}_tflops_per_gpu"] / layout.peak_tflops
    kept = ("sync/gb_per_s", "sync/verify_s", "memory/")
    row |= {key.replace("/", "_"): value for key, value in metrics.items() if key.startswith(kept)}
    return {key: significant(value) for key, value in row.items()}


def figures(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Of each value of the steps: median, quartiles, smallest and largest."""
    names = ("min", "low", "median", "high", "max")
    result = {}
    for key in rows[0]:
        values = [row[key] for row in rows if key in row]
        found = np.percentile(values, [0, 25, 50, 75, 100])
        result[key] = {name: significant(float(value)) for name, value in zip(names, found)}
    return result


def significant(value: float, digits: int = 5) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def table(points: list[dict]) -> str:
    """In Markdown: medians, and the quartiles of a step."""
    header = ["model and overrides", "GPUs", "step s (quartiles)", *PHASES, "rest", "tokens/s/GPU", "of responses",
              "while generating", "update MFU", "log-prob MFU", "sync GB/s", "GPU GB"]  # fmt: skip
    rows = [header, ["---"] * len(header)]
    for point in points:
        if point["steps"]:
            rows.append(cells(point))
        else:
            rows.append([point["label"], "failed", *[""] * (len(header) - 2)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cells(point: dict) -> list[str]:
    found = point["figures"]

    def median(key: str, form: str) -> str:
        return format(found[key]["median"], form) if key in found else "-"

    step, memory = found["step_s"], [value["max"] for key, value in found.items() if key.startswith("memory_")]
    return [
        point["label"] + " (failed later)" * ("failed" in point),
        str(point["gpus"]),
        f"{step['median']:.2f} ({step['low']:.2f}-{step['high']:.2f})",
        *(median(f"{name}_s", ".2f") for name in (*PHASES, "rest")),
        median("tokens_per_s_per_gpu", ",.0f"),
        median("response_tokens_per_s_per_gpu", ",.0f"),
        median("generate_tokens_per_s_per_gpu", ",.0f"),
        median("update_mfu", ".1%"),
        median("logprob_mfu", ".1%"),
        median("sync_gb_per_s", ".3g"),
        f"{max(memory):.0f}" if memory else "-",
    ]


@dataclass(frozen=True)
class Change:
    """Of the seconds of a phase, from one report to another."""

    label: str
    key: str
    before: float
    after: float
    low: float  # of the 95 % interval of after / before
    high: float
    is_judged: bool  # the phase has a share of the step that matters

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def verdict(self) -> str:
        if self.low > 1:
            return "slower"
        return "faster" if self.high < 1 else "within noise"

    def is_slower_than(self, limit: float) -> bool:
        """By more than this share, and beyond the noise."""
        return self.is_judged and self.verdict == "slower" and self.ratio > 1 + limit


def compare(before: list[dict], after: list[dict]) -> list[Change]:
    """The points that both have, by label.

    The interval of a ratio of medians is bootstrapped from the steps of both: each is drawn anew with replacement. It
    holds what differs from step to step; what differs from run to run, of the same code on the same machine, it cannot.
    """
    by_label = {point["label"]: point for point in after}
    changes = []
    for point in before:
        other = by_label.get(point["label"])
        if other is None or not point["steps"] or not other["steps"]:
            continue
        step_s = point["figures"]["step_s"]["median"]
        for key in ("step_s", *(f"{name}_s" for name in (*PHASES, "rest"))):
            a, b = (np.array([row[key] for row in steps]) for steps in (point["steps"], other["steps"]))
            if min(a.min(), b.min()) <= 0:
                continue  # a phase that this placement does not have
            low, high = ratio_interval(a, b)
            medians = float(np.median(a)), float(np.median(b))
            changes.append(Change(point["label"], key, *medians, low, high, max(medians) >= JUDGED_SHARE * step_s))
    return changes


def ratio_interval(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval of median(after) / median(before)."""
    generator = np.random.default_rng(0)
    a, b = (np.median(generator.choice(values, (NUM_DRAWS, len(values))), axis=1) for values in (before, after))
    low, high = np.percentile(b / a, [2.5, 97.5])
    return float(low), float(high)


def comparison_table(changes: list[Change]) -> str:
    lines = ["| model and overrides | | before | after | ratio (95 %) | |", "|---|---|---|---|---|---|"]
    for c in changes:
        verdict = c.verdict if c.is_judged else f"{c.verdict} (not judged: below {JUDGED_SHARE:.0%} of the step)"
        ratio = f"{c.ratio:.3f} ({c.low:.3f}-{c.high:.3f})"
        lines.append(f"| {c.label} | {c.key} | {c.before:.4g} | {c.after:.4g} | {ratio} | {verdict} |")
    return "\n".join(lines)
