"""Violations of the config schema as lines for the user: where, which key, what was given, what is allowed."""

import copy
import difflib
import math
import re
from collections.abc import Iterable, Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megarl.config_file import Document
from megarl.config_other_names import OTHER_NAMES

TYPE_NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
GIVEN_NAMES = TYPE_NAMES | {bool: "a boolean", list: "a list", dict: "a mapping"}
BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("min_length", "of length >="))


def validate[Schema: BaseModel](schema: type[Schema], document: Document) -> Schema:
    """The config that the document describes; its violations go to `document.problems`.

    Where there are violations the result is a stand-in for looking at the other keys: a violating key has its default
    (or "" if it is required) and is listed in `document.doubtful`.
    """
    tree = copy.deepcopy(document.tree)
    reported: set[str] = set()
    while True:
        try:
            return schema.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail in details:
            key, field = find_field(schema, detail["loc"])
            key = given_key(tree, key)
            missing = is_missing(detail, key)
            if missing and field is not None and section_of(field.annotation):
                set_value(tree, key, {})  # the next pass finds the keys that the section requires
                continue
            if not covers(reported, key):
                reported.add(key)
                document.problems.append(explain(schema, document, key, field, detail))
            if missing:
                set_value(tree, key, "")
            else:
                section, name = parent(tree, key)
                section.pop(name, None)
        document.doubtful |= reported | {mapping for key in reported if (mapping := mapping_around(schema, key))}


def explain(
    schema: type[BaseModel], document: Document, key: str, field: FieldInfo | None, detail: ErrorDetails
) -> str:
    """One line for one of pydantic's violations."""
    if field is None:
        near = nearest_keys(schema, key)
        if isinstance(value_at(document.tree, key), dict):
            near = [other for other in near if section_of(annotation_at(schema, other))] or near
        document.doubtful.update(near)  # what was meant is not what is there
        return unknown_key(schema, document, key, near)
    if is_missing(detail, key):
        return document.line("missing, a required key", key)
    value = value_at(document.tree, key)
    given = document.origins[key].given if key in document.origins else repr(value)
    given = "null" if value is None else f"{given} ({GIVEN_NAMES.get(type(value), type(value).__name__)})"
    words = allowed(field)
    rest = detail["loc"][len(key.split(".")) :]
    if rest and has_sections(field.annotation):  # where in the value no key of the schema leads to
        words += f"; at {'.'.join(map(str, rest))}: {detail['msg']}"
    if isinstance(value, float) and not math.isfinite(value):
        words = words.replace("a number", "a finite number")
    if meant := nearest_choices(field, value):
        words += f"; did you mean {' or '.join(meant)}?"
    return document.line(f"given {given}, allowed: {words}", key)


def is_missing(detail: ErrorDetails, key: str) -> bool:
    return detail["type"] == "missing" and key == ".".join(map(str, detail["loc"]))  # else: an item of a list is


def unknown_key(schema: type[BaseModel], document: Document, key: str, near: list[str]) -> str:
    origin = document.origins[key]
    section = key.rpartition(".")[0]
    in_file = not origin.where.startswith("override ")
    given = f" (given {origin.given})" if in_file else ""
    if near:
        if in_file:  # the section is in the line already
            near = [name.rpartition(".")[2] if name.rpartition(".")[0] == section else name for name in near]
        return document.line(f"unknown key{given}; did you mean {' or '.join(near)}?", key)
    if mapping := mapping_around(schema, key):
        names = keys_by_name(schema, mapping)
    else:
        names = [name.rpartition(".")[2] for name in known_keys(schema) if name.rpartition(".")[0] == section]
    of_section = f" of {section}" if section else ""
    return document.line(f"unknown key{given}; valid keys{of_section}: {', '.join(names)}", key)


def nearest_keys(schema: type[BaseModel], key: str) -> list[str]:
    """Known keys that `key` may stand for: what others call it, else of its own section, else anywhere below it, else
    anywhere in the tree."""
    section, dot, name = key.rpartition(".")
    if name in OTHER_NAMES:
        return [OTHER_NAMES[name]]
    if mapping := mapping_around(schema, key):
        names = keys_by_name(schema, mapping)
        return [f"{section}.{other}" for other in nearest(name, names)]
    known = list(known_keys(schema))
    below = [other for other in known if other.startswith(section + dot)]
    own = [other for other in below if other.rpartition(".")[0] == section]
    for candidates in (own, below, known):
        names = nearest(name, [other.rpartition(".")[2] for other in candidates])
        if names:
            return [other for other in candidates if other.rpartition(".")[2] in names]
    return []


def nearest_choices(field: FieldInfo, value: Any) -> list[str]:
    """Of a field that takes one of some words, those that the value may stand for: `Dr.GRPO` and `reinforce++` too."""
    if get_origin(field.annotation) is not Literal or not isinstance(value, str):
        return []
    word = re.sub("[^a-z0-9]+", "_", value.lower().replace("++", "_plus_plus")).strip("_")
    return nearest(word, get_args(field.annotation), cutoff=0.7)


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The names that `word` is, abbreviates (`kl`, `lr`, `tp`) or misspells; empty if none is near."""
    names = list(dict.fromkeys(names))
    if word in names:
        return [word]
    whole = [name for name in names if name.startswith(word) and len(word) > 1]
    initials = [name for name in names if "".join(part[:1] for part in name.split("_")) == word]
    return whole or initials or difflib.get_close_matches(word, names, n=1, cutoff=cutoff)


def known_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all sections and keys."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            yield from known_keys(section, f"{prefix}{name}.")


def find_field(schema: type[BaseModel], location: tuple[str | int, ...]) -> tuple[str, FieldInfo | None]:
    """Pydantic's location -> the dotted key of the schema it is in, and its field; None for an unknown key.

    A name that stands for a section in a mapping of them has the mapping's field.
    """
    names: list[str] = []
    field: FieldInfo | None = None
    section: type[BaseModel] | None = schema
    named: type[BaseModel] | None = None
    for name in map(str, location):
        if section is None and named is None:  # inside a value: an item of a list
            break
        names.append(name)
        if section is None:
            section, named = named, None
            continue
        field = section.model_fields.get(name)
        section, named = (section_of(field.annotation), named_section(field.annotation)) if field else (None, None)
    return ".".join(names), field


def field_at(schema: type[BaseModel], key: str) -> FieldInfo | None:
    return find_field(schema, tuple(key.split(".")))[1]


def annotation_at(schema: type[BaseModel], key: str) -> Any:
    field = field_at(schema, key)
    return None if field is None else field.annotation


def keys_by_name(schema: type[BaseModel], mapping: str) -> list[str]:
    """The keys of the section that a mapping of the schema holds by name."""
    section = named_section(annotation_at(schema, mapping))
    assert section is not None, f"{mapping} holds no sections"
    return list(section.model_fields)


def mapping_around(schema: type[BaseModel], key: str) -> str | None:
    """The mapping of sections by name that a key is in; None where it is in none."""
    names = key.split(".")
    for depth in range(1, len(names)):
        section = ".".join(names[:depth])
        if (field := field_at(schema, section)) is not None and named_section(field.annotation):
            return section
    return None


def given_key(tree: dict, key: str) -> str:
    """The key, or where a value stands in the place of one of its sections, that section's: a short form of it."""
    names = key.split(".")
    value: Any = tree
    for depth, name in enumerate(names[:-1], start=1):
        value = value.get(name, {})
        if not isinstance(value, dict):
            return ".".join(names[:depth])
    return key


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, optional or not; None for a plain value."""
    options = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else [annotation]
    for candidate in options:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def has_sections(annotation: Any) -> bool:
    """Whether a field holds sections in a list or by name."""
    return (isinstance(annotation, type) and issubclass(annotation, BaseModel)) or any(
        has_sections(argument) for argument in get_args(annotation)
    )


def named_section(annotation: Any) -> type[BaseModel] | None:
    """The section of which a field holds any number by name."""
    return section_of(get_args(annotation)[1]) if get_origin(annotation) is dict else None


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: `a number > 0, or null`."""
    bounds = [
        f"{sign} {bound}"
        for constraint in field.metadata
        for name, sign in BOUNDS
        if (bound := getattr(constraint, name, None)) is not None
    ]
    is_union = get_origin(field.annotation) in (UnionType, Union)
    options = get_args(field.annotation) if is_union else [field.annotation]
    words = " or ".join(type_in_words(option) for option in options if option is not NoneType)
    optional = is_union and NoneType in get_args(field.annotation)
    return " ".join([words, " and ".join(bounds)]).strip() + (", or null" if optional else "")


def type_in_words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in arguments)
    if get_origin(annotation) is tuple:
        return f"a list of {len(arguments)} {TYPE_NAMES[arguments[0]].removeprefix('a ')}s"
    if get_origin(annotation) is list and get_origin(arguments[0]) is Literal:
        return "a list of " + ", ".join(get_args(arguments[0]))
    if get_origin(annotation) is list and (section := section_of(arguments[0])):
        return f"a file, {{{', '.join(section.model_fields)}}}, or a list of these"
    if get_origin(annotation) is list:
        return f"a list of {TYPE_NAMES[arguments[0]].removeprefix('a ')}s"
    if get_origin(annotation) is dict:
        section = named_section(annotation)
        return f"a name, or names with a number or {{{', '.join(section.model_fields)}}}" if section else "a mapping"
    return "a section of keys" if section_of(annotation) else TYPE_NAMES[annotation]


def covers(keys: Iterable[str], key: str) -> bool:
    """Whether one of `keys` is `key` or a section around it."""
    return any(key == other or key.startswith(other + ".") for other in keys)


def parent(tree: dict, key: str) -> tuple[dict, str]:
    """The mapping that holds the dotted key, and the key's own name."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    return tree, name


def value_at(tree: dict, key: str) -> Any:
    section, name = parent(tree, key)
    return section[name]


def set_value(tree: dict, key: str, value: Any) -> None:
    section, name = parent(tree, key)
    section[name] = value
