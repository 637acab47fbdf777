"""What every section of the config is: typed, closed and frozen."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )


def changed_keys(section: Section, usual: Section, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key behind `prefix`, its value, what it is in `usual`), as a config has them, of keys that differ."""
    for name in type(section).model_fields:
        value, other = getattr(section, name), getattr(usual, name)
        if isinstance(value, Section) and isinstance(other, Section):
            yield from changed_keys(value, other, f"{prefix}{name}.")
        elif value != other:
            yield prefix + name, _as_given(section, name), _as_given(usual, name)


def _as_given(section: Section, name: str) -> Any:
    value = getattr(section, name)
    return value if isinstance(value, Section) else section.model_dump(include={name})[name]
