"""Preference pairs from the samples that a run has logged: best against worst of each group."""

import json
import math
from collections import Counter
from pathlib import Path

import yaml

from megarl.data.row_errors import raise_if_any, short
from megarl.data.sources import read_rows
from megarl.errors import ConfigError
from megarl.sample import Status

LOG_ALL = "trainer.num_logged_samples=null logs all responses of a run"
COLUMNS = {  # of samples.jsonl: what a value must be
    "step": lambda value: type(value) is int,
    "group": lambda value: type(value) is int,
    "messages": lambda value: isinstance(value, list) and len(value) > 0,
    "response": lambda value: isinstance(value, str),
    "reward": lambda value: type(value) in (int, float) and math.isfinite(value),
    "status": lambda value: value in [status.value for status in Status],
}


def write_pairs(
    run: str | Path, out: str | Path, margin: float, first_step: int | None = None, last_step: int | None = None
) -> str:
    """Write the pairs of `run`/samples.jsonl, of these steps, as JSONL to `out`; returns a line that counts them.

    Of each group the response with the highest reward against the one with the lowest, where they differ by `margin`
    or more; the first of equal ones. Groups whose responses were not all logged are left out: their best may be
    missing. So are truncated and aborted responses, as they have no end of turn and training on their text would
    append one, and blank ones. Rows: prompt (messages), chosen, rejected, chosen_reward, rejected_reward, step, and the
    prompt's tools and source if it has them: what the default keys of `data` read.

    Raises ConfigError where `out` exists, where `run` has no config.yaml, where lines are wrong (all of them,
    file:line), or where there is no pair.
    """
    if not margin > 0:
        raise ConfigError(f"--margin {margin:g}: wanted a number above 0")
    path, out = Path(run) / "samples.jsonl", Path(out)
    group_size = read_group_size(Path(run) / "config.yaml")
    groups = read_groups(path, first_step, last_step)
    counts: Counter[str] = Counter()
    pairs = [pair for group in groups if (pair := pair_of(group, group_size, margin, counts)) is not None]
    summary = (
        f"{len(groups)} groups: {len(pairs)} pairs, {counts['incomplete']} incomplete groups, {counts['below']} below "
        f"the margin {margin:g}, {counts['equal']} of equal texts, {counts['single']} with a single response, "
        f"{counts['none']} with none; left out: {counts['truncated']} truncated responses, {counts['aborted']} "
        f"aborted, {counts['blank']} blank"
    )
    if counts["incomplete"]:
        summary += f"; incomplete have fewer logged responses than algorithm.group_size = {group_size}: {LOG_ALL}, but "
        summary += "for those whose reward failed"
    if not pairs:
        raise ConfigError(f"{path}: no pair to write; {summary}. A smaller --margin takes more groups")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.writelines(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    except FileExistsError:
        raise ConfigError(f"{out} exists already; pairs never overwrite") from None
    return f"wrote {out}; {summary}"


def read_group_size(path: Path) -> int:
    """algorithm.group_size of a run's config.yaml."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; a run's folder has its config, which says how large a group is")
    return yaml.safe_load(path.read_text(encoding="utf-8"))["algorithm"]["group_size"]


def read_groups(path: Path, first_step: int | None, last_step: int | None) -> list[list[dict]]:
    """The rows of each (step, group) whose step is in the range, ends included, in the file's order."""
    errors: list[str] = []
    groups: dict[tuple[int, int], list[dict]] = {}
    steps = set()
    for line, row in read_rows(path, errors):
        wrong = [key for key, is_right in COLUMNS.items() if not is_right(row.get(key))]
        errors += [f"{path}:{line}: {key}: given {short(row.get(key))}" for key in wrong]
        if wrong:
            continue
        steps.add(row["step"])
        if (first_step is None or row["step"] >= first_step) and (last_step is None or row["step"] <= last_step):
            group = groups.setdefault((row["step"], row["group"]), [])
            group.append(row)
            if row["messages"] != group[0]["messages"]:
                errors.append(f"{path}:{line}: group {row['group']} of step {row['step']} has two prompts")
    raise_if_any(errors, path)
    if not steps:
        raise ConfigError(f"{path}: no samples; {LOG_ALL}")
    if not groups:
        held = f"steps {min(steps)} to {max(steps)}"
        raise ConfigError(f"{path}: no samples of the steps asked for; the file holds {held}")
    return list(groups.values())


def pair_of(group: list[dict], group_size: int, margin: float, counts: Counter) -> dict | None:
    """A row to write; None where the group has none, with the reason counted."""
    if len(group) < group_size:
        counts["incomplete"] += 1
        return None
    usable = []
    for row in group:
        if row["status"] != Status.COMPLETED.value:
            counts[row["status"]] += 1
        elif not row["response"].strip():
            counts["blank"] += 1
        else:
            usable.append(row)
    if len(usable) < 2:
        counts["single" if usable else "none"] += 1
        return None
    best, worst = (pick(usable, key=lambda row: row["reward"]) for pick in (max, min))
    if best["reward"] - worst["reward"] < margin:
        counts["below"] += 1
        return None
    if best["response"] == worst["response"]:
        counts["equal"] += 1
        return None
    pair = {
        "prompt": best["messages"],
        "chosen": best["response"],
        "rejected": worst["response"],
        "chosen_reward": best["reward"],
        "rejected_reward": worst["reward"],
        "step": best["step"],
    }
    return pair | {key: best[key] for key in ("tools", "source") if best.get(key) is not None}
