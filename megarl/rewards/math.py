r"""Mathematical equality of the last box of a response and the answer, by the library `math-verify`.

Choices, where several are defensible (the tests have one line for each):
- the box that begins last, of those that are closed: `\boxed{1} so \boxed{2}` is 2, `\boxed{1} or \boxed{2` is 1, and
  of nested ones it is the inner; braces are counted as LaTeX does, so `\{` and `\}` do not count; no box, no reward;
- the answer may be plain, end with GSM8K's `#### 18`, or be a worked solution, whose last box is taken;
- bare decimals are read as the reward gsm8k reads them: `1,234` is 1234, `7.` is 7, `1e3` is 1000;
- all else is math-verify's. Equal: `\frac12` and 0.5, decimals that round to the same six places (0.333333 and
  `\frac13`), `(x+1)^2` and `x^2+2x+1`, `\text{E}` and E, `x=5` and 5, `50\%` and both 50 and 0.5; units, degrees and
  currencies do not count (`18 km` is 18 and `18 m`); `1,2` is the set `\{2,1\}`. Different: 0.333 and `\frac13`,
  `(1,2)` and `(2,1)`, `[1,2]` and `(1,2)`; but the answer `(1,2)` equals the response `1,2`;
- an answer that math-verify cannot read, as `0.\overline{3}`, equals the same text, and all else is an error.

The comparison runs in a process of its own: sympy on a model's text can compute for ever inside one C call, or take all
memory, and only a process can be ended then, from any thread.
"""

import json
import re
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megarl.errors import RunError
from megarl.rewards.gsm8k import MARKER, number_text, parse_number

if TYPE_CHECKING:
    from megarl.sample import Sample

BOX = re.compile(r"\\boxed\s*\{")
# braces; an opened box; a line break, unless models mean one backslash before `boxed`; an escaped brace
TOKEN = re.compile(r"\{+|\}+|\\(?:boxed\s*\{|\\(?!boxed)|[{}])")
DECIMAL = re.compile(r"[+-]?[0-9.,]+([eE][+-]?[0-9]+)?")  # no unit, which parse_number would pass over
START_S = 120.0  # for the process to import sympy on a busy machine
KILL_S = 30.0  # for the kernel to end a killed process


def math(sample: "Sample", *, timeout_s: Annotated[float, Field(gt=0)] = 5.0) -> float:
    """1.0 if the response's last box equals the answer, else 0.0; 0.0 also where finding out takes over `timeout_s`.

    Raises ValueError where the answer is missing or cannot be read: that is a fault of the data. RunError where the
    process that compares cannot be started.
    """
    gold = gold_of(sample.prompt.answer)
    answer = (last_boxed(sample.response_text) or "").strip()
    if not answer:
        return 0.0
    return float(is_trivially_equal(gold, answer) or COMPARER.equal(gold, answer, timeout_s))


def gold_of(answer: str | None) -> str:
    """The reference answer without what may stand before it."""
    if answer is None:
        raise ValueError("the prompt has no answer (data.answer_key)")
    gold = last_boxed(answer)
    if gold is None:
        gold = answer.rpartition(MARKER)[2]
    if not gold.strip():
        raise ValueError(f"the answer {answer[-80:]!r} is empty")
    return gold.strip()


def answer_of(response: str) -> str | None:
    """What the last box holds, without white space; bare decimals as numbers. Terms that are equal but written in other
    ways (`\\frac12`, `0.5`) are different answers here: telling them takes the process that compares, for each pair."""
    answer = "".join((last_boxed(response) or "").split())
    number = parse_number(answer) if DECIMAL.fullmatch(answer) else None
    return (answer or None) if number is None else number_text(number)


def last_boxed(text: str) -> str | None:
    """What the closed box of a text that begins last holds; None without one. Linear in the length of the text."""
    first, end = BOX.search(text), text.rfind("}") + 1
    opened: list[int | None] = []  # of each open brace: where its content begins, if it is a box's
    best = (-1, -1)
    for match in TOKEN.finditer(text, first.start(), end) if first else ():
        token = match[0]
        if token[0] == "{":
            opened += [None] * len(token)
        elif BOX.fullmatch(token):
            opened.append(match.end())
        elif token[0] == "}":
            for place in range(match.start(), match.start() + min(len(token), len(opened))):
                begin = opened.pop()
                if begin is not None:
                    best = max(best, (begin, place))
    return text[best[0] : best[1]] if best[0] >= 0 else None


def is_trivially_equal(gold: str, answer: str) -> bool:
    if gold == answer:
        return True
    if not (DECIMAL.fullmatch(gold) and DECIMAL.fullmatch(answer)):
        return False
    number = parse_number(gold)
    return number is not None and number == parse_number(answer)


class Comparer:
    """The process that compares. It is kept, and started when first needed and after it had to be killed."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.connection: Connection | None = None

    def equal(self, gold: str, answer: str, timeout_s: float) -> bool:
        """False also where the answer takes over timeout_s or kills the process.

        Raises ValueError where the gold does, or cannot be read.
        """
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self._start()
            try:
                self.connection.send_bytes(json.dumps([gold, answer]).encode())  # escapes lone surrogates
                is_readable = self._reply(timeout_s)
                equal = self._reply(timeout_s) if is_readable else None
            except BaseException:  # an interrupt: the next comparison would be given the replies to this one
                self._kill()
                raise
        if not is_readable:
            raise ValueError(f"the answer {gold[-80:]!r} is no mathematical expression that can be read")
        if equal is None:
            comparison = f"{answer[:80]!r} against {gold[:80]!r}"
            print(f"math: 0, as no result within {timeout_s:g} s: {comparison}", file=sys.stderr, flush=True)
        return equal is True

    def _reply(self, timeout_s: float) -> bool | None:
        """What the process says next; None, and it is killed, where it does not or has died."""
        try:
            if self.connection.poll(timeout_s):
                return json.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            pass
        self._kill()
        return None

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-m", "megarl.rewards.math_child", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()])
        if not self._reply(START_S):
            raise RunError(f"the process that compares answers did not start within {START_S:g} s: {' '.join(command)}")

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait(KILL_S)
        self.process.stdin.close()
        self.connection.close()


COMPARER = Comparer()
