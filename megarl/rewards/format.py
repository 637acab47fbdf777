"""Whether a response has the wanted form, by tags in order or by a regular expression; its content is not looked at."""

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

if TYPE_CHECKING:
    from megarl.sample import Sample


def check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"no regular expression: {error}") from error
    return pattern


Pattern = Annotated[str, AfterValidator(check_pattern)]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.:-]*$")]


def format(
    sample: "Sample", *, pattern: Pattern | None = None, tags: Annotated[list[Tag], Field(min_length=1)] | None = None
) -> float:
    """1.0 if the response has the form, else 0.0; white space around it does not count.

    `tags`: the response is <think>...</think><answer>...</answer> for [think, answer]: each opened and closed once, in
    this order, none in another, only white space outside; what is inside may be empty. `pattern`: the whole response
    matches it, where `.` is also a line break. With both, both must hold; with neither, the tags are think and answer.
    Where the chat template opens the first tag, the response only closes it: that wants a pattern. One that
    backtracks without end is ended by rewards.timeout_s.
    """
    text = sample.response_text.strip()
    if pattern is None and tags is None:
        tags = ["think", "answer"]
    has_tags = tags is None or consists_of(text, tags)
    return float(has_tags and (pattern is None or re.fullmatch(pattern, text, re.DOTALL) is not None))


def consists_of(text: str, tags: list[str]) -> bool:
    """Whether a text is these tags in this order, each with content of its own."""
    names = "|".join(map(re.escape, tags))
    pieces = re.split(rf"(</?(?:{names})>)", text)  # outside, <tag>, inside, </tag>, outside, ...
    expected = [piece for tag in tags for piece in (f"<{tag}>", f"</{tag}>")]
    return pieces[1::2] == expected and not any(outside.strip() for outside in pieces[::4])
