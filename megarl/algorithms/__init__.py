"""Algorithms as pure functions of samples and batches, by name. A new one is one file and one line here."""

from collections.abc import Callable

from megarl.algorithms.advantages import grpo

ADVANTAGES: dict[str, Callable] = {"grpo": grpo}
