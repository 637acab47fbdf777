"""How a Python 3.12 is found, with interpreters of the test's own; and that the quickstart script starts."""

import os
import subprocess

import pytest
from end_to_end import ROOT


def interpreter(path, version):
    """A stand-in that answers as far as find_python asks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    good = 0 if version == "3.12" else 1
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "Python {version}.0" && exit 0\nexit {good}\n')
    path.chmod(0o755)
    return path


def find_python(tmp_path, **variables):
    """(exit code, stdout, stderr) of find_python with only coreutils and tmp_path/bin on PATH."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    for tool in ("cat", "sh"):
        if not (tmp_path / "bin" / tool).exists():
            (tmp_path / "bin" / tool).symlink_to(f"/bin/{tool}")
    script = f"set -euo pipefail; source {ROOT}/launch/find_python.sh; find_python"
    environment = {"PATH": str(tmp_path / "bin")} | {k: str(v) for k, v in variables.items()}
    result = subprocess.run(["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, timeout=30)
    return result.returncode, result.stdout.strip(), result.stderr


@pytest.mark.parametrize(
    "place, variable, value",
    [
        ("bin/python3.12", "IRRELEVANT", ""),
        ("bin/python3", "IRRELEVANT", ""),
        ("home dir/.pyenv/versions/3.12.4/bin/python", "HOME", "home dir"),
        ("pyenv/versions/3.12.4/bin/python", "PYENV_ROOT", "pyenv"),
        ("conda/bin/python", "CONDA_PREFIX", "conda"),
        ("anywhere/python", "PYTHON", "anywhere/python"),
    ],
)
def test_python_312_is_found(tmp_path, place, variable, value):
    python = interpreter(tmp_path / place, "3.12")
    interpreter(tmp_path / "bin/python3.11", "3.11")
    code, found, _ = find_python(tmp_path, **{variable: tmp_path / value})
    assert code == 0 and found == str(python)


def test_python_312_is_found_by_uv_and_conda(tmp_path):
    python = interpreter(tmp_path / "managed/python", "3.12")
    for tool in ("uv", "conda"):
        folder = tmp_path / tool
        (folder / "bin").mkdir(parents=True)
        answer = python if tool == "uv" else tmp_path / "base"
        (folder / "bin" / tool).write_text(f'#!/bin/sh\necho "{answer}"\n')
        (folder / "bin" / tool).chmod(0o755)
    environment = interpreter(tmp_path / "base/envs/py312/bin/python", "3.12")
    assert find_python(tmp_path / "uv")[:2] == (0, str(python))
    assert find_python(tmp_path / "conda")[:2] == (0, str(environment))


def test_a_wrong_interpreter_is_refused_with_its_version_and_what_to_do(tmp_path):
    python = interpreter(tmp_path / "python", "3.11")
    code, _, error = find_python(tmp_path, PYTHON=python)
    assert code == 1 and "is not Python 3.12 but Python 3.11.0" in error and "uv python install 3.12" in error
    code, _, error = find_python(tmp_path, PYTHON=tmp_path / "nowhere")
    assert code == 1 and "is not Python 3.12" in error


def test_without_any_the_ways_to_get_one_are_shown(tmp_path):
    interpreter(tmp_path / "bin/python3", "3.11")
    code, _, error = find_python(tmp_path)
    assert code == 1 and "no Python 3.12 found (looked for python3.12, pyenv, uv and conda)" in error
    assert "pyenv install 3.12" in error and "PYTHON=/path/to/python3.12" in error


def test_the_quickstart_script_passes_its_arguments_on():
    command = ["bash", str(ROOT / "launch/quickstart.sh"), "seed=2", "--dry-run"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert result.returncode == 0, result.stderr
    assert "seed: 2" in result.stdout and "name: quickstart-" in result.stdout
