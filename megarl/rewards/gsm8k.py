r"""GSM8K's rule: the number after the last `####` of the response equals the reference answer.

Choices, where several are defensible (the tests have one line for each):
- strict marker: no `####`, no reward; the last one wins, also if nothing follows it; no space is needed after it;
- `1,234`, `18.`, `18.00`, `.5`, `1e3`, `- 5`, the sign U+2212, a currency sign and full-width characters are read;
- what follows the number on its line is taken for a unit and may hold no further number: `18 dollars` and `18 km/h` are
  18; `2/3`, `10-12`, `5:30`, `18 + 2`, `18½` and `2 million` are no number. `72%` is 72;
- commas must separate thousands: `1,2` is no number;
- numbers are compared exactly, as decimals: 0.6667 is not 2/3.

Flexible differs where there is no marker: the line of the last digit is then read as if a marker stood before its last
number. To its left a number ends at a word, a bracket, `=`, or punctuation and a space, so `10-12`, `2/3`, `1 234` and
`18 + 2` stay whole and are no number here either; `18 + 2 = 20` is 20, and `18 or 19` is 19. Nor are digits that touch
a Latin letter or what LaTeX builds terms of: `x2`, `COVID-19`, `2^{3}`, `\frac{1}{2}`. No earlier number steps in.
"""

import re
import string
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megarl.sample import Sample

MARKER = "####"
MOST_ZEROS = 30  # of a number's text
# full-width forms -> ASCII, minus sign -> hyphen, wide and no-break spaces -> space
ASCII = {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}
ASCII |= {"\uffe1": "£", "\uffe5": "¥", "\u2212": "-", "\u3000": " ", "\xa0": " "}
NUMBER = re.compile(
    r"(?P<sign1>[+-]?) ?[$€£¥₹]? ?(?P<sign2>[+-]?) ?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?P<exponent>[eE][+-]?[0-9]+)?"
    r"(?P<unit>.*)"
)
NUMBER_WORD = re.compile(r"\b(half|dozen|hundred|thousand|million|billion|trillion)s?\b", re.IGNORECASE)
# all up to the number that a line ends with: to a word, a bracket, `=`; to punctuation, bold face or `$$`
BEFORE_LAST_NUMBER = re.compile(
    r".*(?:[^0-9.,:/*+^×÷–%$€£¥₹eE -]|(?<![0-9])[eE]|[eE](?![0-9+-])"
    r"|[.,:] |(?<![0-9%])(?<![0-9%] )[,:–]|(?<![0-9])\*\*|\$(?=\$))"
)
TOUCHING = (*string.ascii_letters, "_", "^", "√", ")", "}", "}{", "^{", "_{")


def gsm8k(sample: "Sample", *, mode: Literal["strict", "flexible"] = "strict") -> float:
    """1.0 if the response's last marked number equals the answer, else 0.0. A truncated response is no special case.
    `mode` flexible takes the last number of a response that has no marker.

    Raises ValueError where the reference answer is missing or is no number: that is a fault of the data.
    """
    answer, response = sample.prompt.answer, sample.response_text
    if answer is None:
        raise ValueError("the prompt has no answer (data.answer_key)")
    gold = parse_marked_number(answer) if MARKER in answer else parse_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer[-80:]!r} is no number")
    if mode == "flexible" and MARKER not in response:
        return float(parse_last_number(response) == gold)
    return float(parse_marked_number(response) == gold)


def answer_of(response: str, *, mode: Literal["strict", "flexible"] = "strict") -> str | None:
    """The number that `gsm8k` compares, the same text for equal numbers."""
    is_marked = mode == "strict" or MARKER in response
    number = parse_marked_number(response) if is_marked else parse_last_number(response)
    return None if number is None else number_text(number)


def number_text(number: Decimal) -> str:
    """The same text for equal numbers: 7.00 is 7. It has an exponent only where many zeros would take its place."""
    if not number:
        return "0"
    exact = Context(prec=len(number.as_tuple().digits), Emin=MIN_EMIN, Emax=MAX_EMAX)
    shortest = number.normalize(exact)
    return format(shortest, "f" if abs(shortest.adjusted()) <= MOST_ZEROS else "")


def parse_marked_number(text: str) -> Decimal | None:
    """The number on the line after the last marker of a text; None without marker or number."""
    _, marker, tail = text.rpartition(MARKER)
    if not marker:
        return None
    return parse_number(tail.partition("\n")[0])


def parse_last_number(text: str) -> Decimal | None:
    """The last number of a text without marker, by the rule above; None if what stands there is no number."""
    text = to_ascii(text)
    end = max(text.rfind(digit) for digit in string.digits) + 1
    head, tail = text[:end].rpartition("\n")[2], text[end:].partition("\n")[0]
    head = " ".join(head.split())
    before = match[0] if (match := BEFORE_LAST_NUMBER.match(head)) else ""
    number = head[len(before) :]
    if before.endswith(TOUCHING) and number.startswith((*string.digits, ".", "+", "-")):
        return None
    return parse_number(number + tail)


def parse_number(text: str) -> Decimal | None:
    """The one normaliser for reference answers and predictions: a line with a number and perhaps a unit; else None."""
    match = NUMBER.fullmatch(" ".join(to_ascii(text).split()))
    if match is None or (match["sign1"] and match["sign2"]):
        return None
    unit = match["unit"]
    if any(map(str.isnumeric, unit)) or NUMBER_WORD.search(unit):
        return None
    digits = match["digits"].replace(",", "")
    try:
        return Decimal(match["sign1"] + match["sign2"] + digits + (match["exponent"] or ""))
    except InvalidOperation:  # an exponent beyond what Decimal holds
        return None


def to_ascii(text: str) -> str:
    for wide, plain in ASCII.items():  # str.translate takes 50 times as long on long text of other characters
        text = text.replace(wide, plain)
    return text
