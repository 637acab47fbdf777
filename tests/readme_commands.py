"""What the READMEs say in code: commands, fragments of configs, names of keys; and their links."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from end_to_end import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUOTED = r"""'[^']*'|"[^"]*\""""
BEFORE_COMMENT = re.compile(rf"(?:{QUOTED}|[^'\"#]|(?<=\S)#)*")
BETWEEN_SEPARATORS = re.compile(rf"(?:{QUOTED}|&(?!&)|[^'\"&;])+")
OPTIONAL = re.compile(r"(?<!\S)\[([^\]]*)\](?!\S)")
NAME = re.compile(r"(megarl|docker|ray|launch/ray_cluster\.sh)( [a-z]+)+")
STARTS = re.compile(
    r"(megarl|bash|sbatch|docker|ray|python|source|eval|\.venv/bin/\w+|(launch|tools|tests|benchmarks)/\S+) "
)


@dataclass(frozen=True)
class Command:
    """`text`: as it is written, on one line, without its comment."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def documents() -> list[str]:
    """The main README first; paths from the root."""
    beside = sorted([*ROOT.glob("[a-z]*/README.md"), *ROOT.glob("megarl/*/README.md")])
    return [str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *beside, ROOT / "CONTRIBUTING.md")]


def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def blocks(file: str, language: str) -> list[tuple[int, str]]:
    """(line of its first line, its text) of each fenced block of a language."""
    text = read(file)
    return [(line_of(text, m.start(2)), m[2]) for m in FENCE.finditer(text) if m[1] == language]


def without_blocks(text: str) -> str:
    """With empty lines in place of fenced blocks, so that line numbers stay. Fails for blocks of other languages or
    places than are looked for here."""
    other = {match[1] for match in FENCE.finditer(text)} - {"", "bash", "json", "python", "yaml"}
    rest = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    assert not other and "```" not in rest, f"a block that is not understood: {other or rest[rest.index('```') :][:80]}"
    return rest


def inline_code(file: str) -> list[tuple[int, str]]:
    """(line, text) of each `code`; one that is wrapped is on one line again."""
    text = without_blocks(read(file))
    assert text.count("`") % 2 == 0, f"{file}: a backtick without its other one"
    return [(line_of(text, m.start()), " ".join(m[1].split())) for m in re.finditer(r"`([^`]+)`", text)]


def commands() -> list[Command]:
    """All of all documents, in their order: of bash blocks all, of others the lines behind `$`, and of `code` what begins
    as a command does. A single word is the name of a file, and `megarl check` that of a command."""
    found = []
    for file in documents():
        for first, block in blocks(file, "bash"):
            found += [Command(file, first + line, text) for line, text in shell_lines(block)]
        for first, block in blocks(file, ""):
            typed = re.finditer(r"^\$ (.+)$", block, re.MULTILINE)
            found += [Command(file, first - 1 + line_of(block, match.start()), match[1]) for match in typed]
        for line, text in inline_code(file):
            if STARTS.match(text) and not NAME.fullmatch(text):
                found.append(Command(file, line, text))
    return sorted(found, key=lambda command: (documents().index(command.file), command.line))


def shell_lines(block: str) -> list[tuple[int, str]]:
    """(line in the block, command) without comments; lines that end with a backslash or inside quotes go on."""
    found, held, first = [], "", 0
    for number, line in enumerate(block.splitlines()):
        first = first if held else number
        held += line if held.endswith("\n") else line.strip()
        if held.endswith("\\"):
            held = held[:-1]
            continue
        command = BEFORE_COMMENT.match(held)[0]
        if command != held and held[len(command)] != "#":  # an open quote
            held += "\n"
            continue
        assert "<<" not in command, f"no here-documents in READMEs: {command}"
        found += [(first, piece.strip(" &")) for piece in BETWEEN_SEPARATORS.findall(command) if piece.strip(" &")]
        held = ""
    assert not held, f"does not end: {held}"
    return found


def words(text: str) -> list[str]:
    """Of the command that is run: what `eval` evaluates, without assignments before it; paths from the root."""
    if evaluated := re.fullmatch(r'eval "\$\((.*)\)"', text):
        text = evaluated[1]
    split = [word.removeprefix("$PWD/") for word in shlex.split(text)]
    while re.match(r"[A-Z_]+=", split[0]):
        split = split[1:]
    return split


def variants(text: str) -> list[str]:
    """Without what stands in [brackets], and with all of it."""
    if not OPTIONAL.search(text):
        return [text]
    both = OPTIONAL.sub("", text), OPTIONAL.sub(lambda match: match[1].replace("...", ""), text)
    return [" ".join(variant.split()) for variant in both]


def links(file: str) -> list[tuple[int, str]]:
    """(line, target) of each link and picture that is not on the web."""
    text = without_blocks(read(file))
    found = [(line_of(text, m.start(1)), m[1]) for m in re.finditer(r"\]\(([^)\s]+)\)", text)]
    return [(line, target) for line, target in found if not re.match(r"[a-z]+:", target)]


def anchors(file: Path) -> set[str]:
    """Of a file's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(file.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
