"""What is wrong with rows: collected over all of them, and reported at once."""

from pathlib import Path

from megarl.errors import ConfigError

NUM_SHOWN_ERRORS = 10


def raise_if_any(errors: list[str], where: str | Path) -> None:
    if not errors:
        return
    shown = errors[:NUM_SHOWN_ERRORS]
    count = f"{len(errors)} error(s) in {where}"
    if len(errors) > len(shown):
        count += f", the first {len(shown)}"
    raise ConfigError("\n  ".join([count + ":", *shown]))


def has_column(row: dict, place: str, column: str, named_by: str, errors: list[str]) -> bool:
    if column not in row:
        columns = ", ".join(row) or "none"
        errors.append(f"{place}: no column {column}, or null in it ({named_by}); columns: {columns}")
    return column in row


def short(value: object, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else text[: length - 3] + "..."
