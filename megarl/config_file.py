"""A config file and `key.path=value` overrides -> one tree of plain values, and where each of them was written.

Nothing here knows the schema: that is `megarl.config`; the wording of its violations is `megarl.config_errors`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.errors import ConfigError


class Loader(yaml.SafeLoader):
    """Plain scalars as in YAML 1.2: `1e-6` is a number, `no`, `1:30` and `2026-01-01` are strings. No aliases."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # as its base has it

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # of yaml's own stubs
            raise yaml.composer.ComposerError(None, None, "aliases are not supported: write the value again", mark)
        return super().compose_node(parent, index)


class Dumper(yaml.SafeDumper):
    """Puts strings that the loader would take for something else into quotes; YAML 1.1 has `1e6` as a string."""


for tag, pattern, first_characters in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*\.[0-9]*([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|nan))",
        list("-+.0123456789"),
    ),
):
    resolver = f"tag:yaml.org,2002:{tag}", re.compile(rf"^(?:{pattern})$"), first_characters
    Loader.add_implicit_resolver(*resolver)
    Dumper.add_implicit_resolver(*resolver)


@dataclass(frozen=True)
class Origin:
    where: str  # "configs/x.yaml:12" or "override trainer.steps=5"
    given: str  # the value as it was written, on one line


@dataclass
class Document:
    """What the file and the overrides say. Keys are dotted paths from the root: `roles.actor.nodes`."""

    path: str
    tree: dict = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # whole lines for the user
    doubtful: set[str] = field(default_factory=set)  # keys whose value is not to be built on

    def line(self, text: str, *keys: str) -> str:
        """`text` as an error line about keys[0], placed where the first of the keys that was written at all stands."""
        where = next((self.origins[key].where for key in keys if key in self.origins), self.path)
        return f"{where}: {text}" if where.startswith(f"override {keys[0]}=") else f"{where}: {keys[0]}: {text}"


def read(path: str | Path, overrides: Iterable[str]) -> Document:
    """The file's tree with the overrides applied; duplicate keys and malformed overrides are listed in `problems`.

    Raises ConfigError where there is no tree to go on with: the file cannot be read or is not a YAML mapping.
    """
    document = Document(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config file: {error.strerror}") from error
    try:
        tree = parse(text, "", document, lambda mark: f"{path}:{mark.line + 1}")
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {yaml_reason(error)}") from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(f"{path}:1: a mapping of keys is expected, given {shorten(text)}")
    document.tree = tree or {}

    seen: dict[str, str] = {}
    for override in overrides:
        apply_override(override, document, seen)
    return document


def dump(tree: dict) -> str:
    """YAML that `read` reads back."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def apply_override(override: str, document: Document, seen: dict[str, str]) -> None:
    """Set one `key.path=value`; a mapping sets the keys that it names. `seen` maps keys to their override so far."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        document.problems.append(f"override {override}: key.path=value is expected")
        return
    if key in seen:
        document.problems.append(f"override {override}: {key} is overridden twice, first by {seen[key]}")
        return
    seen[key] = override
    document.origins[key] = Origin(f"override {override}", shorten(text))
    try:
        value = parse(text, key, document, lambda mark: f"override {override}")
    except (yaml.YAMLError, ValueError) as error:
        document.problems.append(f"override {override}: the value is not valid YAML: {yaml_reason(error)}")
        document.doubtful.add(key)
        return

    *parents, name = key.split(".")
    section = document.tree
    for depth, parent in enumerate(parents, start=1):
        document.origins.setdefault(".".join(parents[:depth]), Origin(f"override {override}", shorten(text)))
        if section.get(parent) is None:
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            document.problems.append(f"override {override}: {'.'.join(parents[:depth])} is a value, not a section")
            document.doubtful.add(key)
            return
    merge(section, name, value)


def merge(section: dict, name: str, value: Any) -> None:
    if isinstance(value, dict) and isinstance(section.get(name), dict):
        for child, child_value in value.items():
            merge(section[name], child, child_value)
    else:
        section[name] = value


def parse(text: str, root: str, document: Document, locate: Callable[[yaml.Mark], str]) -> Any:
    """The value of a YAML text that stands at key `root`; notes the origin of each key in `document`.

    A key that is given twice or is no plain name goes to `document.problems`, its last value is kept or dropped.
    """
    loader = Loader(text)

    def build(node: yaml.Node, key: str) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [build(item, f"{key}[{index}]") for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return loader.construct_object(node)
        assert isinstance(node, yaml.MappingNode), node
        return build_mapping(node, f"{key}." if key else "")

    def build_mapping(node: yaml.MappingNode, prefix: str) -> dict:
        mapping: dict[str, Any] = {}
        first_at: dict[str, str] = {}
        for name_node, value_node in node.value:
            where = locate(name_node.start_mark)
            if name_node.tag != "tag:yaml.org,2002:str" or "." in name_node.value:
                raw = shorten(text[name_node.start_mark.index : name_node.end_mark.index])
                reason = "a key is a plain name; nest sections instead of dots"
                if ":" in name_node.value:
                    reason = "a key is a plain name; a function goes below one: {NAME: {function: pkg.module:function}}"
                document.problems.append(f"{where}: {prefix}{raw}: {reason}")
                continue
            key = prefix + name_node.value
            if name_node.value in mapping:
                document.problems.append(f"{where}: {key}: given twice, first at {first_at[name_node.value]}")
                document.doubtful.add(key)
            first_at.setdefault(name_node.value, where)
            raw = text[value_node.start_mark.index : value_node.end_mark.index]
            document.origins[key] = Origin(where, shorten(raw))
            mapping[name_node.value] = build(value_node, key)
        return mapping

    node = loader.get_single_node()
    return None if node is None else build(node, root)


def yaml_reason(error: yaml.YAMLError | ValueError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        return ", ".join(part for part in (error.context, error.problem) if part)
    return " ".join(str(error).split())


def shorten(text: str, limit: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
