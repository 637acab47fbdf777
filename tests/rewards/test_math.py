r"""The reward `math`: boxes by brace counting, equality by math-verify in a process that can be ended at any moment."""

import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.errors import RunError
from megarl.rewards import math_child
from megarl.rewards.math import COMPARER, Comparer, last_boxed, math
from megarl.sample import Prompt, Sample

LONG = 200_000  # characters


def reward(response, gold, **options):
    prompt = Prompt(messages=[], token_ids=[1], answer=gold)
    return math(Sample.from_response(prompt, [2], group_id=0, index=0, response_text=response), **options)


@pytest.mark.parametrize(
    "response, gold, expected",
    [
        # case O05
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{3}", 0.0),
        (r"\boxed{1} so \boxed{2}", "2", 1.0),
        (r"\boxed{1} so \boxed{2}", "1", 0.0),
        (r"\boxed{\text{E}}", "E", 1.0),
        (r"\boxed{\text{E}}", "F", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"\boxed{}", "42", 0.0),
        (r"\boxed{\left\{1,2\right\}}", r"\{1,2\}", 1.0),
        (r"\boxed{ 0.5 }", r"\frac12", 1.0),
        # which box
        (r"\boxed{1} or \boxed{2", "1", 1.0),
        (r"\boxed{so \boxed{3}}", "3", 1.0),
        (r"\boxed {7}", "7", 1.0),
        (r"\\boxed{7}", "7", 1.0),
        (r"$$\boxed{7}$$ That took 2 steps.", "7", 1.0),
        (r"\boxed{ }", "7", 0.0),
        ("the answer is 7", "7", 0.0),
        ("", "7", 0.0),
        # decimals
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{1234}", "1,234", 1.0),
        (r"\boxed{7.}", "7", 1.0),
        (r"\boxed{1e3}", "1000", 1.0),
        (r"\boxed{-0.50}", "-.5", 1.0),
        (r"\boxed{-5}", "\u22125", 1.0),
        (r"\boxed{1,2}", "12", 0.0),
        (r"\boxed{0.333333}", r"\frac13", 1.0),
        (r"\boxed{0.333}", r"\frac13", 0.0),
        (r"\boxed{3.14}", r"\pi", 0.0),
        # expressions
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{x^2+2x}", "(x+1)^2", 0.0),
        (r"\boxed{y^2}", "x^2", 0.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{5}", "x=5", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{1\frac{1}{2}}", r"\frac{3}{2}", 1.0),
        (r"\boxed{6}", "3!", 1.0),
        # percent, units, degrees, currency
        (r"\boxed{50\%}", "50", 1.0),
        (r"\boxed{0.5}", r"50\%", 1.0),
        (r"\boxed{0.5}", "50", 0.0),
        (r"\boxed{18\text{ km}}", "18", 1.0),
        (r"\boxed{18 \text{ km}}", r"18 \text{ m}", 1.0),
        (r"\boxed{19 km}", "18 km", 0.0),
        (r"\boxed{90^\circ}", "90", 1.0),
        (r"\boxed{\$18.90}", "18.9", 1.0),
        # sets, tuples, intervals
        (r"\boxed{2, 1}", r"\{1,2\}", 1.0),
        (r"\boxed{1}", "1, 2", 0.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{1,2}", "(1,2)", 1.0),
        (r"\boxed{(1,2)}", "[1,2]", 0.0),
        (r"\boxed{(-\infty, 3]}", r"\left(-\infty,3\right]", 1.0),
        # words
        (r"\boxed{East}", r"\text{East}", 1.0),
        (r"\boxed{West}", r"\text{East}", 0.0),
        (r"\boxed{(A)}", "A", 1.0),
        (r"\boxed{A, B}", "A", 0.0),
        # a number among other words is no answer
        (r"\boxed{maybe 4 or 5}", "5", 0.0),
        (r"\boxed{5 \foo}", "5", 0.0),
    ],
)
def test_answers_in_boxes(response, gold, expected):
    assert reward(response, gold) == expected


@pytest.mark.parametrize("gold", ["18", "#### 18", "9*2 = 18\n#### 18", r"It is \boxed{18}.", r"\boxed{17} \boxed{18}"])
def test_every_way_to_give_the_gold_is_the_same(gold):
    assert reward(r"\boxed{18}", gold) == 1.0
    assert reward(r"\boxed{17}", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "", "  ", "####", r"\boxed{}", "\n"])
def test_a_missing_gold_is_an_error_and_not_a_0(gold):
    with pytest.raises(ValueError, match="answer"):
        reward("no box", gold)


@pytest.mark.parametrize("gold", [r"0.\overline{3}", "?", "(" * 5000 + "1" + ")" * 5000])
def test_a_gold_that_cannot_be_read_is_an_error_and_not_a_0(gold):
    with pytest.raises(ValueError, match="no mathematical expression"):
        reward(r"\boxed{5}", gold, timeout_s=0.5)


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{a{b}{c{d}}e}f", "a{b}{c{d}}e"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed{1 \\\boxed{2}}", "2"),
        (r"{\boxed{1}", "1"),
        (r"}\boxed{1}}", "1"),
        (r"\boxed 1", None),
        (r"\boxed{{1}", None),
        ("boxed{1}", None),
        ("\\boxed{\n1\n}", "\n1\n"),
    ],
)
def test_braces_are_counted(text, expected):
    assert last_boxed(text) == expected


PLAIN_TEXT = st.text("ab\\ 1", max_size=3).filter(lambda text: not text.endswith("\\"))


@settings(deadline=None, max_examples=200)
@given(st.recursive(PLAIN_TEXT, lambda inner: st.builds("{}{{{}}}{}".format, PLAIN_TEXT, inner, inner), max_leaves=8))
def test_the_content_of_a_box_is_found_whatever_its_nesting(content):
    assert last_boxed(rf"so \boxed{{{content}}} and {{}}") == content


@settings(deadline=None, max_examples=100)
@given(st.fractions(max_denominator=10**6), st.integers(1, 9))
def test_a_number_equals_itself_in_every_notation_and_no_other_number(number, difference):
    top, bottom = number.numerator, number.denominator
    notations = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf" \dfrac{{{3 * top}}}{{{3 * bottom}}} "]
    for gold in notations:
        for answer in notations:
            assert reward(rf"\boxed{{{answer}}}", gold) == 1.0
    other = number + difference
    assert reward(rf"\boxed{{\frac{{{other.numerator}}}{{{other.denominator}}}}}", notations[0]) == 0.0


@settings(deadline=None, max_examples=100)
@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_decimal_equals_itself_in_every_notation(number):
    fraction = rf"\frac{{{Fraction(number) * 1000}}}{{1000}}"
    for answer in (f"{number}", f"{number:,}", f"{number}000", fraction, f"${number}$"):
        assert reward(rf"\boxed{{{answer}}}", str(number)) == 1.0


LATEX = st.recursive(
    st.sampled_from(["x", "y", "2", "17", r"\pi"]),
    lambda inner: st.one_of(
        st.builds(r"\frac{{{}}}{{{}}}".format, inner, st.sampled_from(["3", "z"])),
        st.builds(r"\sqrt{{{}}}".format, inner),
        st.builds("{}+{}".format, inner, inner),
        st.builds(r"\left({}\right)^{{2}}".format, inner),
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=30)
@given(LATEX)
def test_an_expression_equals_itself_however_it_is_spaced(expression):
    spaced = expression.replace("+", " + ").replace(r"\frac", r"\dfrac")
    assert reward(rf"\boxed{{{spaced}}}", expression) == 1.0


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=60) | st.text("\\{}boxed frac12^_()[],.+-=$%&x", max_size=60))
@example("\0")
@example("5\0")
@example("\ud800")
@example(r"\begin{pmatrix} 1 & 2 \\")
@example(r"\boxed{" + "{}" * (LONG // 2))
@example(r"\boxed{" * LONG + "}" * LONG)
def test_no_model_text_raises(text):
    assert reward(text, "5") in (0.0, 1.0)
    assert reward(rf"\boxed{{{text}}}", "5", timeout_s=1.0) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["a", "7 ", "{", "}", r"\boxed", r"\boxed ", r"\boxed{", "\\", r"\{", r"\}"])
def test_long_text_without_an_answer_takes_under_50_ms(text):
    response = r"\boxed{" + text * (LONG // len(text))
    seconds = []
    for _ in range(3):
        start = time.thread_time()  # others may use this machine
        assert reward(response, "5") == reward(response.removeprefix(r"\boxed{"), "5") == 0.0
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.05


@pytest.mark.parametrize(
    "answer",
    ["9^{9^{9^9}}", "(10^9)!", r"\binom{10^9}{10^8}", "(" * 5000 + "5" + ")" * 5000, "9" * LONG]
    + [r"\frac{1}{" * 3000 + "1" + "}" * 3000, "1," * LONG + "5"],
)
def test_an_answer_that_takes_too_long_gets_0_and_the_next_one_is_compared(answer):
    assert reward(rf"\boxed{{{answer}}}", "5", timeout_s=0.3) == 0.0
    assert reward(r"\boxed{\frac{10}{2}}", "5") == 1.0


def test_threads_may_compare_at_the_same_time():
    answers = [rf"\boxed{{\frac{{{2 * i}}}{{2}}}}" for i in range(20)] + [r"\boxed{9^{9^{9^9}}}"]
    with ThreadPoolExecutor(4) as threads:
        values = list(threads.map(lambda answer: reward(answer, "7", timeout_s=0.5), answers))
    assert values == [float(i == 7) for i in range(21)]
    assert reward(r"\boxed{\frac{14}{2}}", "7") == 1.0  # the threads that started the process are gone


def test_the_process_has_a_memory_limit():
    reward(r"\boxed{\frac{14}{2}}", "7")
    assert resource.prlimit(COMPARER.process.pid, resource.RLIMIT_AS) == (math_child.MEMORY_BYTES,) * 2


def test_the_process_is_kept_and_replaced_when_it_died_in_between():
    reward(r"\boxed{\frac{14}{2}}", "7")
    first = COMPARER.process
    reward(r"\boxed{\frac{16}{2}}", "7")
    assert COMPARER.process is first
    first.send_signal(signal.SIGKILL)
    psutil.wait_procs([psutil.Process(first.pid)], timeout=10)
    assert reward(r"\boxed{\frac{14}{2}}", "7") == 1.0


def test_an_interrupt_leaves_no_reply_to_the_next_comparison():
    assert reward(r"\boxed{\frac{14}{2}}", "7") == 1.0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            reward(r"\boxed{9^{9^{9^9}}}", "7", timeout_s=60.0)
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert reward(r"\boxed{\frac{14}{3}}", "7") == 0.0
    assert reward(r"\boxed{\frac{14}{2}}", "7") == 1.0


def test_a_process_that_cannot_start_is_an_error_of_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    with pytest.raises(RunError, match="math_child"):
        Comparer().equal("7", "8", timeout_s=1.0)


def test_the_process_ends_with_its_parent_in_the_middle_of_a_computation():
    code = (
        "import threading; from megarl.rewards.math import COMPARER; COMPARER.equal('1', '2', 5); "
        "threading.Thread(target=COMPARER.equal, args=('1', '9^{9^{9^9}}', 1000)).start(); "
        "print(COMPARER.process.pid, flush=True)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        before = child.cpu_times().user
        deadline = time.monotonic() + 60
        while child.cpu_times().user < before + 0.3:  # it computes
            assert time.monotonic() < deadline
            time.sleep(0.05)
        parent.kill()
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "outlives its parent"
        time.sleep(0.01)
