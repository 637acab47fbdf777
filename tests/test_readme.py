"""Every command, config fragment, key, name and link of the READMEs is looked at; a soak runs the commands."""

import ast
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from config_folder import folder as folder  # a fixture
from end_to_end import ROOT, TAG, shared_memory, tagged_processes, wait_until
from readme_commands import anchors, blocks, commands, documents, inline_code, links, read, shell_lines, variants, words
from readme_runs import FILLED, FILLED_IN, RUN_ELSEWHERE, RUN_HERE
from test_configs import downloads as downloads  # a fixture

from megarl import cli, config_file
from megarl.cluster import remote
from megarl.config import Config, load
from megarl.config_errors import field_at, validate

OF_RECIPES = {"my_reward.yaml": "algorithm", "my_data.yaml": "data"}  # configs with a section of a recipe
NO_KEYS = {"rollout.n", "data.json"}  # one of verl's, and a file
# Calls each script or module with its arguments until these are parsed, and says of each what its parser said.
PARSE_ONLY = """
import argparse, contextlib, io, json, runpy, sys

class Parsed(BaseException):
    pass

def stop_after(parse):
    def parse_and_stop(parser, *arguments, **more):
        parse(parser, *arguments, **more)
        raise Parsed
    return parse_and_stop

for name in ("parse_args", "parse_intermixed_args"):
    setattr(argparse.ArgumentParser, name, stop_after(getattr(argparse.ArgumentParser, name)))
said = []
for sys.argv in json.load(sys.stdin):
    run = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        try:
            run(sys.argv[0], run_name="__main__")
            said.append("has no parser")
        except Parsed:
            said.append("")
        except SystemExit as error:
            said.append(err.getvalue() if error.code else "")
        except Exception as error:
            said.append(repr(error))
json.dump(said, sys.stdout)
"""
COMMANDS = commands()


def filled(text: str) -> str:
    for name, value in (FILLED | FILLED_IN.get(text, {})).items():
        text = re.sub(rf"(?<![\w:]){name}(?![\w:])", value, text)
    return text


def test_commands_are_read_as_bash_reads_them():
    block = """
    A=1 megarl train CONFIG 'a={b: [c]}' \\
      name=x#1   # it's a comment; no command
    eval "$(launch/ray_cluster.sh start --nodes 'a b')"
    # nothing
    python -c "print(1); # no comment
    print(2)" && tools/x.py RUN [--out FILE] ; ls"""
    found = [text for _, text in shell_lines(block)]
    assert found[:2] == [
        "A=1 megarl train CONFIG 'a={b: [c]}' name=x#1",
        "eval \"$(launch/ray_cluster.sh start --nodes 'a b')\"",
    ]
    assert found[2:] == ['python -c "print(1); # no comment\n    print(2)"', "tools/x.py RUN [--out FILE]", "ls"]
    assert words(found[0]) == ["megarl", "train", "CONFIG", "a={b: [c]}", "name=x#1"]
    assert words(found[1]) == ["launch/ray_cluster.sh", "start", "--nodes", "a b"]
    assert [variants(text) for text in (found[0], found[3])] == [
        [found[0]],
        ["tools/x.py RUN", "tools/x.py RUN --out FILE"],
    ]


def test_every_command_is_run_here_or_by_another_test():
    texts = {command.text for command in COMMANDS}
    elsewhere = [text for of_test in RUN_ELSEWHERE.values() for text in of_test]
    classified = [*RUN_HERE, *elsewhere]
    new = [str(command) for command in COMMANDS if command.text not in classified]
    assert not new, "\n".join(["to be put into RUN_HERE or RUN_ELSEWHERE of tests/readme_runs.py:", *new])
    assert len(texts) > 50 and sorted(classified) == sorted(texts), "twice, or in no README"
    assert not [text for text in RUN_HERE if variants(text) != [text]], "what is optional is not to be run"
    for test in RUN_ELSEWHERE:
        file, _, name = test.partition("::")
        names = [node.name for node in ast.parse(read(file)).body if isinstance(node, ast.FunctionDef)]
        assert name in names and name.startswith("test_"), test


def test_every_placeholder_is_known():
    for command in COMMANDS:
        left = re.findall(r"(?<![\w.$-])[A-Z][A-Z_:]*\b(?![\w=.])", filled(command.text))
        assert not set(left) - {"HEAD"}, f"{command}: {left}"


def test_every_command_is_one_that_its_program_takes(monkeypatch):
    monkeypatch.chdir(ROOT)
    problems, asking, calls = [], [], []
    for command in COMMANDS:
        for variant in variants(command.text):
            line = f"{filled(variant)} {RUN_HERE.get(variant, '')}".strip()
            try:
                calls += check(words(line))
            except (AssertionError, SystemExit) as error:
                problems.append(f"{command}: {error}")
            asking += [command] * (len(calls) - len(asking))
    benchmarks = [path for path in sorted(Path("benchmarks").glob("*.py")) if "add_argument(" in path.read_text()]
    assert len(benchmarks) >= 10
    calls += [[str(path), "--help"] for path in benchmarks]
    child = [sys.executable, "-c", PARSE_ONLY]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(child, input=json.dumps(calls), env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = zip([*asking, *benchmarks], json.loads(done.stdout), strict=True)
    problems += [f"{command}: {text}" for command, text in said if text]
    assert not problems, "\n".join(problems)


def check(arguments: list[str]) -> list[list[str]]:
    """Fails where the command makes no sense; the calls of scripts with a parser that is still to be asked."""
    program, rest = arguments[0], arguments[1:]
    if program == "bash":
        return check(rest)
    if program in ("megarl", ".venv/bin/megarl"):
        check_megarl(rest)
    elif program == "sbatch":
        script = next(i for i, word in enumerate(rest) if not word.startswith("-"))
        assert (ROOT / rest[script]).is_file() and rest[script].endswith(".sbatch"), rest[script]
        check_megarl(["train", *rest[script + 1 :]])
    elif program == "launch/quickstart.sh":
        check_megarl(["train", "configs/quickstart.yaml", *rest])
    elif program == "launch/ray_cluster.sh":
        remote.parse(rest)
    elif program == "launch/serve_ab.sh":
        return [["megarl.rollout.serve_ab", *rest]]
    elif program == "launch/setup_env.sh":
        assert all(f'"{extra}": [' in read("setup.py") for extra in rest), rest
    elif program in ("tests/run.sh", "tests/gpu/run.sh", "tests/lint.sh"):
        check_pytest(rest)
    elif program == "python" and rest[:2] == ["-m", "pytest"]:
        check_pytest(rest[2:])
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], "-c", "exec")
    elif program == "python":
        return check(rest)
    elif program.endswith(".py"):
        assert (ROOT / program).is_file(), program
        return [arguments]
    elif program == "ray":
        assert rest[:2] == ["job", "submit"]
        return check(rest[rest.index("--") + 1 :]) if "--" in rest else []
    elif program == "docker":
        given = [word.partition("=")[0] for flag, word in pairwise(rest) if flag == "--build-arg"]
        assert all(f"ARG {name}=" in read("Dockerfile") for name in given), given
        return check(rest[rest.index("megarl") + 1 :]) if rest[0] == "run" else []  # what follows the image
    else:
        assert program in ("source", ".venv/bin/ruff"), f"how is {program} to be looked at?"
    if program.endswith(".sh"):
        assert (ROOT / program).is_file(), program
    return []


def check_megarl(arguments: list[str]) -> None:
    """By the parser of the command line, and the schema for the config with the overrides."""
    options = cli.parse(arguments)
    if options.command in ("clean", "plot"):
        return
    file, overrides = getattr(options, "config", getattr(options, "target", None)), options.overrides
    if file is None and overrides and "=" not in overrides[0]:
        file, overrides = overrides[0], overrides[1:]
    if file is None or file in OF_RECIPES:
        overrides = [*(recipe(file) if file else []), *overrides]
        file = "configs/quickstart.yaml"
    document = config_file.read(file, overrides)
    document.tree.setdefault("name", "name")
    validate(Config, document)
    assert not document.problems, document.problems


def check_pytest(arguments: list[str]) -> None:
    assert all((ROOT / word).exists() for word in arguments if "/" in word), arguments


@pytest.mark.parametrize("file", documents())
def test_every_link_leads_to_a_file_and_its_heading(file):
    problems = []
    for line, target in links(file):
        path, _, anchor = target.partition("#")
        place = (ROOT / file).parent / path if path else ROOT / file
        if not place.exists():
            problems.append(f"{file}:{line}: no {path}")
        elif anchor and anchor not in anchors(place):
            problems.append(f"{file}:{line}: no heading #{anchor} in {path or file}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("file", documents())
def test_every_file_that_is_named_is_there(file):
    path = re.compile(r"(configs|launch|tools|benchmarks|tests|megarl)/[\w./-]+")
    named = [(line, text) for line, text in inline_code(file) if path.fullmatch(text)]
    assert not [f"{file}:{line}: {text}" for line, text in named if not (ROOT / text).exists()]


def test_every_name_that_links_to_a_module_is_defined_there():
    count, problems = 0, []
    for file in documents():
        for name, target in re.findall(r"\[`([^`/]+)`\]\(([^)#]+\.py)\)", read(file)):
            count += 1
            if not name.endswith(".py") and name not in names_in((ROOT / file).parent / target):
                problems.append(f"{file}: {name} is not in {target}")
    assert count > 30 and not problems, "\n".join(problems)


def names_in(file: Path) -> set[str]:
    """Functions, classes, their methods, and what is assigned at the top of a module."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body if hasattr(child, "name")}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


FRAGMENTS = [(file, line, text) for file in documents() for line, text in blocks(file, "yaml")]


@pytest.mark.parametrize("file, line, text", FRAGMENTS, ids=[f"{file}:{line}" for file, line, _ in FRAGMENTS])
def test_every_fragment_of_a_config_is_accepted(folder, monkeypatch, file, line, text):
    (folder / "my_rewards.py").write_text(my_rewards())
    monkeypatch.syspath_prepend(str(folder))
    for path in re.findall(r"[\w/]+\.jsonl", text):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    sys.modules.pop("my_rewards", None)
    load("base.yaml", as_overrides(text), to_run=False)
    sys.modules.pop("my_rewards", None)  # another test's is another file


def as_overrides(fragment: str) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in yaml.load(fragment, config_file.Loader).items()]


def recipe(config: str) -> list[str]:
    """What one of OF_RECIPES adds to configs/quickstart.yaml: the fragment of the main README."""
    (text,) = [text for _, text in blocks("README.md", "yaml") if text.startswith(f"{OF_RECIPES[config]}:")]
    return as_overrides(text)


def my_rewards() -> str:
    (text,) = [text for _, text in blocks("README.md", "python") if text.startswith("def brevity(")]
    return text


def test_every_key_that_is_named_is_one_of_the_schema():
    count, problems = 0, []
    for file in documents():
        text = read(file)
        if file == "README.md":  # the first cells of its tables have others' keys
            text = re.sub(r"^\| [^|]+ \|", "|", text, flags=re.MULTILINE)
        for code in re.findall(r"`([^`\n]+)`", text):
            for key in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+(?![\w./-])", code):
                if key.partition(".")[0] in Config.model_fields and key not in NO_KEYS:
                    count += 1
                    if field_at(Config, key) is None:
                        problems.append(f"{file}: {key}")
    assert count > 100 and not problems, "\n".join(problems)


@pytest.fixture(scope="module")
def clone(tmp_path_factory, downloads, toy_folder):
    """The repository's files, without an environment, and what the recipes and the configs for real models want."""
    clone = tmp_path_factory.mktemp("clone") / "megarl"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for path in filter(None, listed.stdout.split("\0")):
        if (ROOT / path).is_file():
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, clone / path)
    for name in ("models", "data"):
        shutil.copytree(downloads / name, clone / name)
    (clone / "my_rewards.py").write_text(my_rewards())
    for name, kind in (("train", "train"), ("test", "validation")):
        rows = map(json.loads, (toy_folder / f"{kind}.jsonl").read_text().splitlines())
        lines = [json.dumps({"question": row["question"], "solution": row["answer"], "unit": "pens"}) for row in rows]
        (clone / f"my_{name}.jsonl").write_text("\n".join(lines) + "\n")
    for name in OF_RECIPES:
        document = config_file.read(ROOT / "configs/quickstart.yaml", recipe(name))
        (clone / name).write_text(config_file.dump(document.tree))
    yield clone
    shutil.rmtree(clone)


@pytest.fixture
def environment(clone):
    """Of a user's shell without an environment of Python; all that it starts is ended behind the test."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    path = [part for part in os.environ["PATH"].split(os.pathsep) if part != str(ROOT / ".venv/bin")]
    own = {"PATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": "", TAG: uuid.uuid4().hex}
    own["PYTEST_DEBUG_TEMPROOT"] = str(clone.parent)
    yield {key: value for key, value in os.environ.items() if key not in hidden} | own
    for pid in tagged_processes(own[TAG]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run(line: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, output) of a line of bash, which ends with this process."""
    with open(folder.parent / "output.txt", "w+", errors="replace") as output:
        command, both = ["setpriv", "--pdeathsig", "TERM", "bash", "-c", line], {"stdout": output, "stderr": output}
        done = subprocess.run(command, cwd=folder, env=environment, timeout=900, **both)
        output.seek(0)
        return done.returncode, output.read()


@pytest.mark.soak
def test_the_commands_work_as_they_are_written(clone, environment):
    """Each once, in their order, the first of which makes the environment; a failure does not keep the others."""
    memory, failed = shared_memory(), []
    for text in dict.fromkeys(command.text for command in COMMANDS if command.text in RUN_HERE):
        line = f"{filled(text)} {RUN_HERE[text]}".strip()
        started = time.monotonic()
        sets_variables = text.startswith("source ")
        code, output = run(f"{line} && env -0" if sets_variables else line, clone, environment)
        if sets_variables and code == 0:
            environment = dict(entry.split("=", 1) for entry in output.split("\0") if "=" in entry)
        print(f"{time.monotonic() - started:4.0f} s, exit code {code}: {line}", flush=True)
        if code != 0:
            failed.append(f"exit code {code}: {line}\n{output[-3000:]}")
        if not wait_until(lambda: not tagged_processes(environment[TAG]), 30):
            failed.append(f"{line}\nleft {tagged_processes(environment[TAG])}")
    assert not failed, "\n\n".join(failed)
    assert wait_until(lambda: shared_memory() <= memory, 10), shared_memory() - memory
    assert {"curves.png", "exported", "runs", "rewards.json"} <= {path.name for path in clone.iterdir()}
