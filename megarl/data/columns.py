"""Which columns of a file hold prompts, answers, responses and rewards, by option or by usual names."""

from dataclasses import dataclass
from typing import Any

from megarl.config_data import SourceConfig
from megarl.data.row_errors import raise_if_any
from megarl.data.sources import read_source
from megarl.errors import ConfigError

USUAL_NAMES = {  # of columns; the first that a file has is taken
    "prompt": ("prompt", "question", "problem", "instruction", "messages"),
    "answer": ("answer", "solution", "ground_truth"),
    "response": ("response", "completion", "output"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "reward": ("reward", "score"),
}


@dataclass(frozen=True)
class Columns:
    """Which column holds what; None or nothing: none is read."""

    prompt: str
    answer: str | None = None
    responses: tuple[str, ...] = ()
    reward: str | None = None

    def __str__(self) -> str:
        names = ("response",) if len(self.responses) == 1 else ("chosen", "rejected")
        read = {"prompt": self.prompt, "answer": self.answer, "reward": self.reward} | dict(zip(names, self.responses))
        return ", ".join(f"{what} in {column!r}" for what, column in read.items() if column is not None)


def find_columns(source: SourceConfig, keys: dict[str, str | None]) -> Columns:
    """The columns that `keys` names, and where it has None, those of a usual name: both or none of a pair, which goes
    before a response, and a reward only if it is a number.

    Raises ConfigError where a named column is not there, where there is none for the prompt, and where the file has no
    rows at all.
    """
    values, errors = first_values(source)
    if not values:
        raise_if_any(errors, source)
        raise ConfigError(f"{source}: no rows")
    columns = f"columns: {', '.join(values)}"
    missing = [f"{name} (--{what}-key)" for what, name in keys.items() if name is not None and name not in values]
    if missing:
        raise ConfigError(f"{source}: no column {', '.join(missing)}; {columns}")

    found = {
        what: keys[what] or next((name for name in usual if name in values), None)
        for what, usual in USUAL_NAMES.items()
    }
    if found["prompt"] is None:
        usual = ", ".join(USUAL_NAMES["prompt"])
        raise ConfigError(f"{source}: no column of prompts, as {usual}; {columns}; valid: --prompt-key COLUMN")
    pair = (found["chosen"], found["rejected"])
    if (keys["chosen"] or keys["rejected"]) and (None in pair or keys["response"]):
        raise ConfigError(f"{source}: --chosen-key and --rejected-key go together, without --response-key; {columns}")
    responses = (found["response"],) if keys["response"] or None in pair else pair
    if keys["reward"] is None:
        found["reward"] = usual_reward(values)
    return Columns(found["prompt"], found["answer"], tuple(filter(None, responses)), found["reward"])


def first_values(source: SourceConfig) -> tuple[dict[str, Any], list[str]]:
    """(The first value of each column, errors of rows that cannot be read.)"""
    errors: list[str] = []
    values: dict[str, Any] = {}
    for _, row in read_source(source, errors):
        for name, value in row.items():
            values.setdefault(name, value)
    return values, errors


def usual_reward(values: dict[str, Any]) -> str | None:
    """The column of a usual name that holds numbers."""
    return next((name for name in USUAL_NAMES["reward"] if type(values.get(name)) in (int, float)), None)
