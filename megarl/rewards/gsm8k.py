"""GSM8K's rule: the number after the last `####` of the response equals the reference answer.

Choices, where several are defensible (the tests have one line for each):
- strict marker: no `####`, no reward; the last one wins, also if nothing follows it; no space is needed after it;
- `1,234`, `18.`, `18.00`, `.5`, `1e3`, `- 5`, the sign U+2212, a currency sign and full-width characters are read;
- what follows the number on its line is taken for a unit and may hold no further number: `18 dollars` and `18 km/h` are
  18; `2/3`, `10-12`, `5:30`, `18 + 2`, `18½` and `2 million` are no number. `72%` is 72;
- commas must separate thousands: `1,2` is no number;
- numbers are compared exactly, as decimals: 0.6667 is not 2/3.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.sample import Sample

MARKER = "####"
# full-width forms -> ASCII, minus sign -> hyphen, wide and no-break spaces -> space
ASCII = {0xFF01 + i: chr(0x21 + i) for i in range(94)} | {0x2212: "-", 0x3000: " ", 0xA0: " "}
NUMBER = re.compile(
    r"(?P<sign1>[+-]?) ?[$€£¥₹]? ?(?P<sign2>[+-]?) ?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<exponent>[eE][+-]?[0-9]+)?"
    r"(?P<unit>.*)"
)
NUMBER_WORD = re.compile(r"\b(half|dozen|hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)


def gsm8k(sample: "Sample") -> float:
    """1.0 if the response's last marked number equals the answer, else 0.0. A truncated response is no special case.

    Raises ValueError where the reference answer is missing or is no number: that is a fault of the data.
    """
    answer = sample.prompt.answer
    if answer is None:
        raise ValueError("the prompt has no answer (data.answer_key)")
    gold = parse_marked_number(answer) if MARKER in answer else parse_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer[-80:]!r} is no number")
    return float(parse_marked_number(sample.response_text) == gold)


def parse_marked_number(text: str) -> Decimal | None:
    """The number on the line after the last marker of a text; None without marker or number."""
    _, marker, tail = text.rpartition(MARKER)
    if not marker:
        return None
    return parse_number(tail.partition("\n")[0])


def parse_number(text: str) -> Decimal | None:
    """The one normaliser for reference answers and predictions: a line with a number and perhaps a unit; else None."""
    match = NUMBER.fullmatch(" ".join(text.translate(ASCII).split()))
    if match is None or (match["sign1"] and match["sign2"]):
        return None
    unit = match["unit"]
    if any(character.isnumeric() for character in unit) or NUMBER_WORD.search(unit):
        return None
    digits = match["digits"].replace(",", "")
    try:
        return Decimal(match["sign1"] + match["sign2"] + digits + (match["exponent"] or ""))
    except InvalidOperation:  # an exponent beyond what Decimal holds
        return None
