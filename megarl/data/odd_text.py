"""What can be odd about a text by itself: its characters, their width, an answer that says nothing."""

import re
from decimal import Decimal

from megarl.rewards.gsm8k import MARKER, parse_number, to_ascii
from megarl.rewards.math import last_boxed

FULL_WIDTH = re.compile("[\uff01-\uff5e\u3000]")
FULL_WIDTH_LETTER = re.compile("[０-９Ａ-Ｚａ-ｚ]")
HALF_WIDTH_LETTER = re.compile("[0-9A-Za-z]")
EAST_ASIAN = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")

ODD_CHARACTERS = {
    "replacement character": re.compile("\ufffd"),
    "control character": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"),
    # Joiners and marks of direction have a meaning in many scripts and in emoji, but none after a character of ASCII.
    "invisible character": re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e\u2066-\u2069]|(?<=[ -~])[\u200c-\u200f]"),
    "UTF-8 read as Latin-1": re.compile("â€|[ÃÂ][\u0080-\u00bf]|ï»¿"),
}
PLACEHOLDERS = {"n/a", "nan", "none", "null", "nil", "unknown", "undefined", "tbd", "todo"}


def normalise(text: str) -> str:
    """The text without differences of case, of white space and of full against half width."""
    return " ".join((text if text.isascii() else to_ascii(text)).casefold().split())


def odd_character(text: str) -> tuple[int, str] | None:
    """Place and kind of the first odd character."""
    found = [(match.start(), kind) for kind, pattern in ODD_CHARACTERS.items() if (match := pattern.search(text))]
    return min(found, default=None)


def full_width_place(text: str) -> int | None:
    """Of the first digit or letter of full width. Signs count too, but not among East Asian characters, where they are
    as they should be."""
    match = (FULL_WIDTH_LETTER if EAST_ASIAN.search(text) else FULL_WIDTH).search(text)
    return None if match is None else match.start()


def final_answer(answer: str) -> str:
    """What a worked solution ends with: its last box, or what stands after GSM8K's marker; else the whole answer."""
    return (last_boxed(answer) or answer.rpartition(MARKER)[2]).strip()


def comparable_answer(answer: str) -> Decimal | str:
    """Equal for final answers that are the same number, or the same text."""
    final = final_answer(answer)
    number = parse_number(final)
    return normalise(final) if number is None else number


def answer_fault(answer: str, is_number_expected: bool) -> str | None:
    """What is odd about an answer that is not empty."""
    final = final_answer(answer)
    if normalise(final) in PLACEHOLDERS:
        return "a placeholder"
    if not any(map(str.isalnum, final)):
        return "only punctuation"
    if is_number_expected and parse_number(final) is None:
        return "no number, as most have"
    if answer != answer.strip():
        return "white space around it"
    return None
