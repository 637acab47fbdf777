"""What a check of the configuration finds, and the words and the arithmetic of naming valid choices."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import yaml
from pydantic import BaseModel


@dataclass(frozen=True)
class Violation:
    text: str
    keys: tuple[str, ...]  # all keys that it rests on; the first one is to blame


def in_yaml(value: Any) -> str:
    """A value as a config file has it, on one line: null, true, {gamma: 0.9}."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1e6).removesuffix("...\n").strip()


def divisors(number: int) -> list[int]:
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest_two(value: int, valid: list[int]) -> str:
    """Of sorted numbers, the last one up to the value and the first one above it, where there are such."""
    below, above = [number for number in valid if number <= value], [number for number in valid if number > value]
    return listed(below[-1:] + above[:1])


def nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return listed([below, below + step] if below else [step])


def listed(items: Iterable) -> str:
    return ", ".join(str(item) for item in items)
