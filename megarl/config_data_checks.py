"""What the data's section allows: sources that are there, columns that mean one thing each."""

import itertools
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config_violation import Violation, in_yaml

if TYPE_CHECKING:
    from megarl.config import Config


def check_data(config: "Config") -> Iterator[Violation]:
    data = config.data
    files = [(f"data.{key}", s.path) for key in ("train", "validation") for s in getattr(data, key) or []]
    for key, file in [*files, ("warm_start.data", config.warm_start.data)]:
        if file is not None and not is_toy_file(config, file) and not os.path.isfile(file):
            yield Violation(f"no such file: {file}", (key, "toy.folder"))


def check_sources(config: "Config") -> Iterator[Violation]:
    for key in ("train", "validation"):
        sources = getattr(config.data, key) or []
        for source in sources:
            if (source.path is None) == (source.name is None):
                text = f"given {in_yaml(source)}: a source has a path or a name, and not both"
                yield Violation(text, (f"data.{key}",))
            elif source.path is not None and (source.subset is not None or source.split != "train"):
                text = f"given {in_yaml(source)}: subset and split are of a dataset by name, not of a file"
                yield Violation(text, (f"data.{key}",))
        weighted = [source for source in sources if source.weight is not None]
        if weighted and key == "validation":
            text = f"given weight {weighted[0].weight:g} for {weighted[0]}, but held-out rows are all used; valid: none"
            yield Violation(text, (f"data.{key}",))
        elif 0 < len(weighted) < len(sources):
            without = next(source for source in sources if source.weight is None)
            text = f"{len(weighted)} of {len(sources)} sources have a weight, {without} has none: give all of them one"
            yield Violation(text, (f"data.{key}",))


def check_columns(config: "Config") -> Iterator[Violation]:
    """A column of the data that two keys name would be read as two things."""
    algorithm, data = config.algorithm, config.data
    read: tuple[str, ...]
    if algorithm.has_pairs:
        read = ("prompt_key", "chosen_key", "rejected_key")
    elif algorithm.name == "sft":
        read = ("prompt_key", "response_key")
    else:
        read = ("prompt_key", "answer_key", *(["response_key"] if config.warm_start.data else []))
    named = [key for key in (*read, "tools_key") if getattr(data, key) is not None]
    for first, second in itertools.combinations(named, 2):
        # A warm start may train on the column that holds the reference answer, worked out.
        if getattr(data, first) == getattr(data, second) and (first, second) != ("answer_key", "response_key"):
            text = f"given {getattr(data, second)}, which data.{first} names already; valid: another column"
            yield Violation(text, (f"data.{second}", f"data.{first}", "algorithm.name"))


def check_overlong(config: "Config") -> Iterator[Violation]:
    overlong, name = config.data.overlong, config.algorithm.name
    if config.algorithm.is_supervised and overlong.startswith("truncate"):
        text = f"given {overlong}, but with algorithm.name: {name} a row that is too long is refused; valid: refuse"
        yield Violation(text, ("data.overlong", "algorithm.name"))


def check_chat_template(config: "Config") -> Iterator[Violation]:
    """A name can only be looked up with the tokenizer; a file must be there."""
    template = config.data.chat_template
    if template is not None and ("/" in template or template.endswith(".jinja")) and not os.path.isfile(template):
        yield Violation(f"no such file: {template}", ("data.chat_template",))


def is_toy_file(config: "Config", file: str) -> bool:
    """Whether the run writes it with the toy before it reads it."""
    from megarl.data.toy import FILES

    return config.toy is not None and Path(file) in [Path(config.toy.folder) / name for name in FILES]


DATA_CHECKS = (check_data, check_sources, check_columns, check_overlong, check_chat_template)
