"""The code reward: every form of test case, the choices made, and what code may try for a reward it did not earn."""

import json
import textwrap
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import RunError
from megarl.rewards.code import code, last_block, parse_tests
from megarl.rewards.sandbox_child import canonical, landlock_version
from megarl.sample import Prompt, Sample

pytestmark = pytest.mark.skipif(not landlock_version(), reason="needs a kernel with Landlock")
ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
SUM = "a, b = map(int, input().split())\nprint(a + b)"


def reward(source, tests, *, key="tests", **options):
    prompt = Prompt(messages=[], token_ids=[1], metadata={key: tests})
    text = f"This is it:\n```python\n{textwrap.dedent(source)}\n```\n"
    sample = Sample.from_response(prompt, [2], group_id=0, index=0, response_text=text)
    return code(sample, **options)


FUNCTION_TESTS = [
    ["assert add(1, 2) == 3", "assert add(-1, 5) == 4, 'message'"],
    [{"expression": "add(1, 2)", "expected": 3}],
    [{"expression": "[add(1, 2)] * 2", "expected": [3, 3]}],
    {"inputs": [[1, 2], [0, 5]], "outputs": [3, 5], "fn_name": "add"},
    {"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"},
    {"inputs": ["1\n2", "[1]\n[2, 3]"], "outputs": ["3", "[1, 2, 3]"], "fn_name": "add"},
    [{"input": [1, 2], "output": 3, "fn_name": "add", "type": "function_call"}],
    [{"input": [1, 2.0], "output": 3, "fn_name": "add"}, "assert add(1, 2) == 3.0"],
]


@pytest.mark.parametrize("tests", FUNCTION_TESTS)
def test_functions_are_called_in_every_form_of_test(tests):
    for given_tests in (tests, json.dumps(tests)):
        assert reward(ADD, given_tests) == 1.0
    assert reward(WRONG, tests) == 0.0
    method = "class Solution:\n    def add(self, a, b):\n        return a + b"
    if isinstance(tests, dict):
        assert reward(method, tests) == 1.0


PROGRAM_TESTS = [
    [{"input": "1 2", "output": "3"}, {"input": "4 5\n", "output": "9\n"}],
    [{"input": "1 2", "output": "3", "testtype": "stdin"}],
    {"inputs": ["1 2\n", ["4 5"]], "outputs": ["3 \n\n", ["9"]]},
    {"inputs": ["1 2\n"], "outputs": ["3"], "fn_name": None},
]


@pytest.mark.parametrize("tests", PROGRAM_TESTS)
def test_programs_are_run_in_every_form_of_test(tests):
    assert reward(SUM, tests, key="input_output", tests_key="input_output") == 1.0
    assert reward(SUM, json.dumps(tests)) == 1.0
    assert reward(SUM.replace("+", "-"), tests) == 0.0


@pytest.mark.parametrize(
    "printed, expected, value",
    [
        ("3", "3\n", 1.0),
        ("1 \n2\t\n\n", "1\n2", 1.0),
        ("1\r\n2", "1\n2", 1.0),
        ("", "", 1.0),
        ("1\n\n2", "1\n2", 0.0),
        (" 1", "1", 0.0),
        ("1  2", "1 2", 0.0),
        ("0.50", "0.5", 0.0),
        ("1\n2", "1", 0.0),
        ("", "1", 0.0),
        ("1", "", 0.0),
        ("\ufffd", "ä", 0.0),
    ],
)
def test_output_is_compared_by_lines_without_trailing_whitespace(printed, expected, value):
    assert reward(f"print({printed!r}, end='')", [{"input": "", "output": expected}]) == value


@pytest.mark.parametrize(
    "returned, test, value",
    [
        ("(1, 2)", {"expression": "f()", "expected": [1, 2]}, 1.0),
        ("{1: (2,)}", {"expression": "f()", "expected": {"1": [2]}}, 1.0),
        ("(1, 2)", {"input": [], "output": [1, 2], "fn_name": "f"}, 1.0),
        ("(1, 2)", "assert f() == [1, 2]", 0.0),
        ("(1, 2)", "assert f() == (1, 2)", 1.0),
        ("{2, 1}", "assert f() == {1, 2}", 1.0),
        ("[1, 2]", "assert f() == {1, 2}", 0.0),
        ("1", "assert f() == True", 1.0),
        ("'1'", "assert f() == 1", 0.0),
        ("None", "assert f() == None", 1.0),
        ("0.1 + 0.2", "assert f() == 0.3", 0.0),
        ("-5 + 0j", "assert f() == -5", 1.0),
        ("float('nan')", "assert f() == 0", 0.0),
        ("'a\\nb\\u00e4'", {"expression": "f()", "expected": "a\nbä"}, 1.0),
        ("__import__('collections').Counter('aab')", "assert f() == {'a': 2, 'b': 1}", 1.0),
        ("__import__('numpy').arange(3)", "assert f() == [0, 1, 2]", 1.0),
        ("__import__('numpy').int64(3)", "assert f() == 3", 1.0),
        ("f", "assert f() == 3", 0.0),
    ],
)
def test_values_are_equal_as_in_python_and_from_json_as_in_json(returned, test, value):
    assert reward(f"def f():\n    return {returned}", [test]) == value


def test_partial_gives_the_share_that_passes():
    tests = ["assert f(1) == 1", "assert f(2) == 3", "assert f(3) == 3", "assert f(4) == 4"]
    assert reward("def f(x):\n    return x", tests) == 0.0
    assert reward("def f(x):\n    return x", tests, partial=True) == 0.75
    assert reward("def f(x):\n    if x == 3: raise ValueError\n    return x", tests, partial=True) == 0.5
    tests = {"inputs": ["1 2", "3", "5 5"], "outputs": ["3", "3", "10"]}
    assert reward(SUM, tests, partial=True) == pytest.approx(2 / 3)
    assert reward(SUM, [{"input": "1 2", "output": "3"}, "assert a == 1"], partial=True) == 0.5


def test_time_is_for_all_tests_of_a_response_together():
    inputs = ["1.5", "1.5", *["0"] * 98]
    source = "import time\nn = input()\ntime.sleep(float(n))\nprint(n)"
    assert reward(source, {"inputs": inputs, "outputs": inputs}, timeout_s=2.4, partial=True) == 0.01


def test_the_prelude_runs_before_the_code():
    source = "from __future__ import annotations\ndef f(x: List[int]) -> int:\n    y: List[int] = x\n    return gcd(*y)"
    test = [{"input": [[4, 6]], "output": 2, "fn_name": "f"}]
    assert reward(source, test) == 0.0
    assert reward(source, test, prelude="from typing import *\nfrom math import *") == 1.0
    with pytest.raises(RunError, match="no_such_package"):
        reward(source, test, prelude="import no_such_package")


FORGERIES = {
    "equal to all": """
        class Equal(int):
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __hash__(self): return 0
        def f(x): return Equal(0)""",
    "equal and no number": """
        class Equal:
            def __eq__(self, other): return True
            def __repr__(self): return "12345"
        def f(x): return Equal()""",
    "text that reads so": """
        class Text(str):
            def __str__(self): return "0x3039"
            def __repr__(self): return "0x3039"
        def f(x): return Text()""",
    "exits early": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "sys.exit": "raise SystemExit(0)",
    "prints a verdict": "print('1.0\\n0x3039\\npassed\\nOK')\ndef f(x): print(12345); print('0x3039')",
    "all candidates as answers": """
        import os
        for fd in range(64):
            try:
                os.write(fd, b"".join(b"0x%x\\n" % n for n in range(12340, 12350)))
            except OSError:
                pass
        os._exit(0)""",
    "answers twice": """
        import os
        def f(x):
            for n in range(12340, 12350):
                for fd in range(64):
                    try:
                        os.write(fd, b"0x%x\\n" % n)
                    except OSError:
                        pass
            return 0""",
    "the harness's memory": """
        import gc, re, sys
        text, frame = str(gc.get_objects()), sys._getframe()
        while frame := frame.f_back:
            text += str(frame.f_locals) + str(frame.f_globals)
        words = set(re.findall(r"\\b(?:0x)?[0-9a-f]+\\b", text)) | {"0"}
        numbers = {int(word, 16 if re.search("[a-fx]", word) else 10) for word in words}
        found = [n for n in numbers if n * n == 152399025]
        def f(x): return found[0] + x - 1
        print(found[0])""",
    "a text that answers all calls": """
        import sys
        sys._getframe(1).f_globals["canonical"] = lambda *_: "\\n".join(map(hex, range(12340, 12350)))
        def f(x): return 0""",
    "asserts are gone": "import builtins\nbuiltins.AssertionError = Exception\ndef f(x): return None",
}


@pytest.mark.parametrize("source", FORGERIES.values(), ids=FORGERIES)
def test_a_reward_cannot_be_forged(source):
    tests = ["assert f(1) == 12345", "assert f(2) == 12346"]
    assert reward(source, tests, partial=True) == 0.0
    assert reward(source, [{"input": "1", "output": "12345"}], partial=True) == 0.0


@pytest.mark.parametrize("source", ["while True: pass", "x = ' ' * (1 << 40)", "import os\nos.fork()", "(" * 10**5])
def test_whatever_code_does_is_a_reward_of_0(source):
    for tests in (["assert f(1) == 1"], [{"input": "", "output": "1"}]):
        assert reward(source, tests, timeout_s=0.5) == 0.0


@pytest.mark.parametrize(
    "response, expected",
    [
        ("```python\nx\n```", "x"),
        ("```python\nx\n```\nno:\n```python\ny\n```\n", "y"),
        ("```py\nx\n```\noutput:\n```\n3\n```", "x"),
        ("```Python3 title=a.py\nx\n```\n```text\n3\n```", "x"),
        ("```\nx\n```\n```text\n3\n```", "x"),
        ("```\nx\n\ny\n```", "x\n\ny"),
        ("1. so:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("````python\nx\n````", "x"),
        ("```python\r\nx\r\n```\r\n", "x\r"),
        ("```python\nx = '```'\n```", "x = '```'"),
        ("```python\n```", ""),
        ("```python\nx", None),
        ("```cpp\nx\n```", None),
        ("x ```python\nx\n``` y", None),
        ("def f(): pass", None),
        ("", None),
    ],
)
def test_the_last_python_block_is_run(response, expected):
    assert last_block(response) == expected


def test_a_response_without_code_gets_0():
    prompt = Prompt(messages=[], token_ids=[1], metadata={"tests": ["assert f() == 1"]})
    for text in ("", "def f(): return 1", "```python\ndef f(): return 1"):
        assert code(Sample.from_response(prompt, [2], group_id=0, index=0, response_text=text)) == 0.0


@pytest.mark.parametrize("piece", ["`", "```", "```py\n", "```py", " ", "\t", "a", "```a", "```\n", "\n", "```` x"])
def test_a_long_response_takes_little_time(piece):
    started = time.monotonic()
    last_block(piece * (200_000 // len(piece)))
    last_block("```" + piece * (200_000 // len(piece)) + "`")
    assert time.monotonic() - started < 1.0


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["```", "```python", "\n", " ", "x", "`", "\r", "```py\n", "\n```\n"]), max_size=20))
def test_no_response_makes_finding_code_fail(pieces):
    text = "".join(pieces)
    block = last_block(text)
    assert block is None or all(line in text for line in block.split("\n"))


@pytest.mark.parametrize(
    "tests, part",
    [
        (None, "given None"),
        ("", "Expecting value"),
        ("not JSON", "Expecting value"),
        ([], "given \\[\\]"),
        ("3", "given 3"),
        ({}, "given {}"),
        ({"inputs": [], "outputs": []}, "given \\[\\]"),
        ({"inputs": ["1"], "outputs": []}, "shorter"),
        ({"inputs": 3, "outputs": 3}, "not iterable"),
        ([3], "test 1 is 3"),
        ([{"input": "1", "output": "1"}, {"input": "1"}], "test 2 is .*keys are missing"),
        ([{"input": 1, "output": "1"}], "are text"),
        ([{"input": "1", "output": [1]}], "are text"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "has no fn_name"),
        ([{"input": "1", "output": "no JSON", "fn_name": "f"}], "Expecting value"),
        ([{"input": 1, "output": 1, "fn_name": "f"}], "no list of arguments"),
        ([{"input": [1], "output": 1, "fn_name": "f()"}], "fn_name is no name"),
        ([{"input": [1], "output": 1, "fn_name": 3}], "fn_name is no name"),
        ([{"input": "", "output": "x" * (17 << 20)}], "longer than"),
        ([{"expression": "f(", "expected": 1}], "no Python"),
        ([{"expression": 1, "expected": 1}], "test 1"),
        ([{"expression": "f()", "expected": float("nan")}], "NaN"),
        (["assert f(1)"], "no `assert CALL == LITERAL`"),
        (["assert f(1) == g(1)"], "malformed"),
        (["assert f(1) != 2"], "no `assert"),
        (["x = 1\nassert f(1) == x"], "no `assert"),
        (["assert f(1) == 2 =="], "no Python"),
    ],
)
def test_a_fault_of_the_data_is_an_error_that_names_the_key(tests, part):
    with pytest.raises(ValueError, match=f"(?s)^test_list: .*{part}"):
        parse_tests(tests, "test_list")
    with pytest.raises(ValueError, match="^test_list: "):
        reward("", tests, key="test_list", tests_key="test_list")


def test_a_missing_column_is_an_error():
    with pytest.raises(ValueError, match="^other: given None"):
        reward(ADD, ["assert add(1, 2) == 3"], tests_key="other")


values = st.recursive(
    st.sampled_from([None, False, True, 0, 1.0, -0.0, 0.5, 1j, 1 + 0j, 10**400, float("inf"), "1", "0x1", "'", b"1"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from([0, 1.0, "1", ""]), inner, max_size=2)
        | st.sets(st.sampled_from([0, True, 0.5, "a,b", "a", "b"]), max_size=2)
    ),
    max_leaves=4,
)


@settings(deadline=None, max_examples=300)
@given(values, values)
def test_canonical_texts_are_equal_where_values_are(left, right):
    assert (canonical(left, False) == canonical(right, False)) == (left == right)
    assert "\n" not in canonical(left, False)


@pytest.mark.parametrize("value", [float("nan"), [float("nan")], object(), iter([]), lambda: 0, range(3)])
def test_what_cannot_be_compared_has_no_canonical_text(value):
    with pytest.raises((ValueError, TypeError)):
        canonical(value, False)
