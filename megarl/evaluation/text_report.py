"""Models side by side as text and as CSV."""

import csv
import io

from megarl.evaluation.comparison import Comparison
from megarl.evaluation.estimators import CONFIDENCE, Estimate


def text_report(metrics: dict[str, dict[str, Estimate]], comparisons: list[Comparison]) -> str:
    """A column for each model. `metrics`: of each model by its name, as `metrics_of` returns them."""
    rows = [["", *metrics]]
    for name in metric_names(metrics):
        rows.append([name, *(shown_metric(of_model, name) for of_model in metrics.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", note(metrics), *map(comparison_line, comparisons)]) + "\n"


def csv_report(metrics: dict[str, dict[str, Estimate]]) -> str:
    """A line for each model and metric; the bounds are empty where there is no interval."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["model", "metric", "value", "low", "high", "n"])
    for model, of_model in metrics.items():
        for name, estimate in of_model.items():
            writer.writerow([model, name, estimate.value, estimate.low, estimate.high, estimate.n])
    return file.getvalue()


def metric_names(metrics: dict[str, dict[str, Estimate]]) -> list[str]:
    """Of all models, in the order of the model that has most; those that only others have come last."""
    longest_first = sorted(metrics.values(), key=len, reverse=True)
    return list(dict.fromkeys(name for of_model in longest_first for name in of_model))


def note(metrics: dict[str, dict[str, Estimate]]) -> str:
    counts = dict.fromkeys(str(of_model["errors"].n) for of_model in metrics.values())
    text = f"means over {' and '.join(counts)} prompts, with {CONFIDENCE:.0%} intervals by bootstrap over prompts"
    if any(of_model["errors"].value for of_model in metrics.values()):
        text += "; errors: responses whose reward failed, which count in no reward"
    return text


def shown_metric(of_model: dict[str, Estimate], name: str) -> str:
    """`0.412 [0.380, 0.445]`; with the prompts that it is of, where these are not all."""
    if name not in of_model:
        return "-"
    if name == "errors":
        return f"{of_model[name].value:.0f}"
    estimate, num_prompts = of_model[name], of_model["errors"].n
    return shown_estimate(estimate) + (f" of {estimate.n} prompts" if estimate.n < num_prompts else "")


def shown_estimate(estimate: Estimate, sign: str = "") -> str:
    numbers = [shown(number, sign) for number in (estimate.value, estimate.low, estimate.high) if number is not None]
    return numbers[0] + (f" [{', '.join(numbers[1:])}]" if len(numbers) > 1 else "")


def shown(number: float, sign: str = "") -> str:
    return f"{number:{sign}.{1 if abs(number) >= 100 else 3}f}"


def comparison_line(comparison: Comparison) -> str:
    return (
        f"{comparison.model} against {comparison.baseline}: win rate {shown(comparison.win_rate)} "
        f"({comparison.wins} wins, {comparison.ties} ties, {comparison.losses} losses), "
        f"reward_mean {shown_estimate(comparison.difference, '+')}, {shown_p_value(comparison)}{left_out(comparison)}"
    )


def shown_p_value(comparison: Comparison) -> str:
    text = f"p = {comparison.p_value:.2g}"
    if comparison.num_comparisons > 1:
        text += f", {comparison.holm_p_value:.2g} for {comparison.num_comparisons} comparisons (Holm)"
    return text


def left_out(comparison: Comparison) -> str:
    if not (count := comparison.num_left_out):
        return ""
    return f"; {count} of {count + comparison.difference.n} prompts left out, as one of the two has no reward"
