"""Model code against test cases, in the sandbox of megarl/rewards/sandbox.py.

The tests are a list in a column of the data, or that list as JSON text, as Parquet files have it. A test is one of
- `{"input": "1 2", "output": "3"}`: a program from stdin to stdout; lists of strings are joined as lines;
- `{"input": [1, 2], "output": 3, "fn_name": "add"}`: a function, or a method of `class Solution`, and its arguments;
  where the input is text, each of its lines is an argument in JSON, and the output is JSON too, as in LiveCodeBench;
- `{"expression": "add(1, 2)", "expected": 3}`;
- `"assert add(1, 2) == 3"`, as MBPP has it: an expression and a literal.
Instead of the list, APPS, TACO and LiveCodeBench have `{"inputs": [...], "outputs": [...], "fn_name": "add"}`.

Choices, where several are defensible:
- the last closed block whose tag is python, py or python3 is run; if there is none, the last without a tag;
- each test of a program is a process of its own, which passes if it ends by itself with exit code 0 and prints the
  output; whitespace at the end of a line and of the whole does not count, and numbers are text: 0.50 is not 0.5;
- calls share one process, in which the code runs once, not as `__main__`. Values are equal as in Python, 1 and 1.0 too,
  and floats exactly. What is expected is JSON, so a tuple is a list and keys are strings; for an assert they differ;
- a function's expected output may have been put into a list: `[3]` also accepts 3, as APPS' own check does.
"""

import ast
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from megarl.rewards import sandbox
from megarl.rewards.sandbox_child import canonical

if TYPE_CHECKING:
    from megarl.sample import Sample

FENCE = re.compile(r"([ \t]*+)`{3,}+[ \t]*+([\w+-]*+)[^`]*+")  # possessive, so that long lines take linear time
PYTHON_TAGS = ("python", "py", "python3")
FORMS = (
    '{"input": ..., "output": ...} with or without "fn_name", {"expression": ..., "expected": ...}, "assert CALL == '
    'LITERAL", or instead of the list {"inputs": [...], "outputs": [...]}'
)


@dataclass(frozen=True)
class ProgramTest:
    stdin: str
    stdout: str


@dataclass(frozen=True)
class CallTest:
    expression: str  # or, with arguments, the name of a function
    arguments: list | None
    as_json: bool
    accepted: tuple[str, ...]  # canonical texts


def check_prelude(prelude: str) -> str:
    parse_python(prelude, "exec")
    return prelude


def code(
    sample: "Sample",
    *,
    tests_key: str = "tests",
    timeout_s: Annotated[float, Field(gt=0)] = 10.0,
    memory_mb: Annotated[int, Field(ge=64)] = 512,
    partial: bool = False,
    prelude: Annotated[str, AfterValidator(check_prelude)] = "",
    require_landlock: bool = True,
) -> float:
    """1.0 if the code in the response passes all tests, else 0.0; with `partial` the share that it passes.

    `timeout_s`: wall-clock time for all tests of a response together, tests not come to in it have failed; keep it well
    below rewards.timeout_s, after which the call is an error. `memory_mb`: address space, Python's own included; numpy
    needs 128. `prelude`: code that runs before the response's, as `from typing import *` for LeetCode's signatures.
    `require_landlock`: whether to refuse a kernel that cannot keep the code from reading files.
    Raises ValueError for tests that are missing or of another form, and RunError where the sandbox does not work.
    """
    tests = parse_tests(sample.prompt.metadata.get(tests_key), tests_key)
    source = last_block(sample.response_text)
    if source is None:
        return 0.0
    deadline = time.monotonic() + timeout_s
    options = {"prelude": prelude, "memory_mb": memory_mb, "require_landlock": require_landlock}
    calls = [test for test in tests if isinstance(test, CallTest)]
    programs = [test for test in tests if isinstance(test, ProgramTest)]
    num_passed = num_tried = 0
    if calls:
        questions = [(test.expression, test.arguments, test.as_json) for test in calls]
        answers = sandbox.answer_calls(source, questions, timeout_s=timeout_s, **options)
        num_passed = sum(answer in test.accepted for answer, test in zip(answers, calls))
        num_tried = len(calls)
    for test in programs:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or (not partial and num_passed < num_tried):
            break
        output = sandbox.run_program(source, test.stdin, timeout_s=left_s, **options)
        num_passed += output is not None and lines(output) == lines(test.stdout)
        num_tried += 1
    return num_passed / len(tests) if partial else float(num_passed == len(tests))


def last_block(response: str) -> str | None:
    """The code to run, by the rule above; None without any. Fences are lines, as in CommonMark."""
    blocks: dict[bool, str] = {}  # by whether the tag is Python's
    tag, indent, block = None, "", []
    for line in response.split("\n"):
        fence = FENCE.fullmatch(line.rstrip())
        if tag is None and fence:
            indent, tag, block = fence[1], fence[2].lower(), []
        elif fence and not fence[2]:
            if tag in ("", *PYTHON_TAGS):
                blocks[tag != ""] = "\n".join(block)
            tag = None
        else:
            block.append(line.removeprefix(indent))
    return blocks.get(True, blocks.get(False))


def lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().split("\n")]


def parse_tests(tests: Any, key: str) -> list[ProgramTest | CallTest]:
    """Raises ValueError, naming the key and the test, for what has none of the forms above."""
    try:
        tests = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            tests = [{"input": given, "output": wanted, "fn_name": tests.get("fn_name")} for given, wanted in pairs]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: given {tests!r:.200}, but {error}; valid: a list of {FORMS}") from error
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"{key}: given {tests!r:.200}, valid: a list of {FORMS}")
    parsed = []
    for number, test in enumerate(tests, start=1):
        try:
            parsed.append(parse_test(test))
        except (TypeError, ValueError) as error:  # SyntaxError is no ValueError
            raise ValueError(f"{key}: test {number} is {test!r:.200}, but {error}; valid: {FORMS}") from error
    return parsed


def parse_test(test: Any) -> ProgramTest | CallTest:
    if isinstance(test, str):
        return parse_assert(test)
    if not isinstance(test, dict):
        raise ValueError("it is neither an object nor text")
    if {"expression", "expected"} <= test.keys():
        parse_python(test["expression"], "eval")
        return CallTest(test["expression"], None, True, (canonical(test["expected"], True),))
    if not {"input", "output"} <= test.keys():
        raise ValueError("keys are missing")
    if test.get("fn_name"):
        return parse_function_test(test["fn_name"], test["input"], test["output"])
    if test.get("testtype") == "functional":  # LiveCodeBench's own rows have the name elsewhere
        raise ValueError("it is of testtype functional, but has no fn_name")
    stdin, stdout = as_text(test["input"]), as_text(test["output"])
    if len(stdout.encode()) > sandbox.MAX_OUTPUT:
        raise ValueError(f"the output is longer than the {sandbox.MAX_OUTPUT} bytes that a program may print")
    return ProgramTest(stdin, stdout)


def parse_function_test(name: Any, given: Any, wanted: Any) -> CallTest:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError("fn_name is no name")
    if isinstance(given, str):
        given, wanted = [json.loads(line) for line in given.split("\n")], json.loads(wanted)
    if not isinstance(given, list):
        raise ValueError("the input is no list of arguments")
    accepted = (wanted, *wanted) if isinstance(wanted, list) and len(wanted) == 1 else (wanted,)
    return CallTest(name, given, True, tuple(canonical(value, True) for value in accepted))


def parse_assert(text: str) -> CallTest:
    """`assert EXPRESSION == LITERAL`, with or without a message."""
    match parse_python(text, "exec").body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            return CallTest(ast.unparse(left), None, False, (canonical(ast.literal_eval(right), False),))
    raise ValueError("it is no `assert CALL == LITERAL`")


def parse_python(text: Any, mode: str) -> ast.AST:
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        raise ValueError(f"it is no Python: {error}") from error


def as_text(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("a program's input and output are text, or a list of lines")
    return value
