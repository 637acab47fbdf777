"""`megarl data`: the quality report on a config's data or on one file, and a file's conversion."""

import argparse
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import load
from megarl.data.columns import USUAL_NAMES
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.data.findings import Check
    from megarl.data.tables import Table

WIDTH = 100  # of a line
FILE_OPTIONS = (*(f"{what}_key" for what in USUAL_NAMES), "tokenizer", "max_prompt_tokens", "to_parquet", "to_jsonl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="CONFIG|FILE", help="YAML file, see configs/; or a JSONL or Parquet file")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a key of the config")
    of_file = parser.add_argument_group("for a FILE", "A config has keys for the columns.")
    for what, usual in USUAL_NAMES.items():
        text = f"default: the first there is of {', '.join(usual)}" if len(usual) > 1 else f"default: {what}"
        of_file.add_argument(f"--{what}-key", metavar="COLUMN", help=text)
    of_file.add_argument("--tokenizer", metavar="FOLDER", help="count tokens of templated prompts, not characters")
    of_file.add_argument("--max-prompt-tokens", type=int, metavar="N", help="report longer prompts")
    conversion = of_file.add_mutually_exclusive_group()
    conversion.add_argument("--to-parquet", metavar="OUT", help="convert, and report nothing")
    conversion.add_argument("--to-jsonl", metavar="OUT", help="convert, and report nothing")


def run(options: argparse.Namespace, report: Callable[[str], None] = print) -> int:
    """Report on the data, or convert it. 0: nothing is bad, 1: a check is. Raises ConfigError for wrong input."""
    from megarl.data import convert, tables

    target, given = options.target, [name for name in FILE_OPTIONS if getattr(options, name) is not None]
    if Path(target).suffix in (".yaml", ".yml"):
        if given:
            raise ConfigError(f"{_flag(given[0])} is for a data file, given the config {target}")
        return _report(tables.read_config(load(target, options.overrides)), report)
    if options.overrides:
        raise ConfigError(f"{options.overrides[0]}: keys are of a config, given the data file {target}")
    for name, convert_to in (("to_parquet", convert.to_parquet), ("to_jsonl", convert.to_jsonl)):
        if (out := getattr(options, name)) is not None:
            if len(given) > 1:
                raise ConfigError(f"{', '.join(map(_flag, given))}: a conversion takes no other option")
            report(f"wrote {convert_to(target, out):,} rows to {out}")
            return 0
    if options.max_prompt_tokens is not None and options.max_prompt_tokens < 1:
        raise ConfigError(f"--max-prompt-tokens {options.max_prompt_tokens}: wanted 1 or more")
    if options.max_prompt_tokens is not None and options.tokenizer is None:
        raise ConfigError(f"--max-prompt-tokens {options.max_prompt_tokens}: wants --tokenizer FOLDER, to count by")
    keys = {what: getattr(options, f"{what}_key") for what in USUAL_NAMES}
    return _report([tables.read_file(target, keys, options.tokenizer, options.max_prompt_tokens)], report)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _report(tables: list["Table"], report: Callable[[str], None]) -> int:
    """A section per source, then all verdicts."""
    checked: list[tuple[Table, Check]] = []
    for table in tables:
        report(f"\n== {table.title}")
        report(f"{table.columns}; lengths of prompts in {table.unit}")
        for check in checks_of(table, tables):
            checked.append((table, check))
            report("\n".join(_section(check)))
    report("\n== verdicts")
    report("\n".join(_verdicts(checked, with_names=len(tables) > 1)))
    counts = Counter(check.verdict for _, check in checked)
    report(f"{len(checked)} checks: {counts['ok']} ok, {counts['look']} to look at, {counts['bad']} bad")
    return int(counts["bad"] > 0)


def checks_of(table: "Table", tables: list["Table"]) -> Iterator["Check"]:
    from megarl.data import quality

    yield quality.rows(table.num_rows, table.errors)
    if not table.records:
        return
    yield from quality.check_file(table.records, table.unit, table.prompt_limit, table.is_overlong_refused)
    if table.is_held_out:
        yield from quality.leaks(table.records, [r for other in tables if not other.is_held_out for r in other.records])


def _section(check: "Check") -> Iterator[str]:
    """The check's lines, of WIDTH at most where words allow it."""
    text = f"{check.verdict:4}  {check.name:16}  {check.finding}  [{check.limits}]"
    yield _wrap(text, " " * 24)
    for line in check.details:
        yield _wrap(" " * 6 + line, " " * 10)


def _wrap(line: str, indent: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _verdicts(checked: list[tuple["Table", "Check"]], with_names: bool) -> Iterator[str]:
    names = [_end_of(table.name, 26) if with_names else "" for table, _ in checked]
    width = max(map(len, names))
    for (_, check), name in zip(checked, names):
        line = f"{check.verdict:4}  {check.name:16}  " + f"{name:{width}}  " * with_names + check.finding
        yield line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _end_of(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[3 - length :]
