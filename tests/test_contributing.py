"""CONTRIBUTING.md is followed to the letter: its code goes where it says, in a copy of the repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import ROOT
from hf_models import write_hf_model
from safetensors import safe_open

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"^# ([\w/]+\.py)(?:, (below|in place of): (.+))?$")
MEDIANS = """
from megarl.algorithms import ADVANTAGES
from megarl.config import load
from megarl.sample import Prompt, Sample

config = load("base.yaml", ["algorithm.name=median"])
samples = [Sample.from_response(Prompt([], [1]), [2], group_id=0, index=i, reward=i**2) for i in range(3)]
ADVANTAGES[config.algorithm.advantage](samples)
print([sample.advantages[1].item() for sample in samples], config.algorithm.loss_aggregation)
"""
SIZES = """
import json, sys
from megarl.engine.hf.layout import stored_weights
from megarl.engine.hf.shape import ModelShape

shape = ModelShape.read(sys.argv[1])
sizes = {name: list(size) for weight in stored_weights(shape, "lm") for name, size in weight.hf_shapes(shape).items()}
print(json.dumps(sizes))
"""


def follow(tree: Path) -> list[str]:
    """Put each piece of Python of CONTRIBUTING.md where its first line says; the paths that changed."""
    changed = []
    for block in re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL):
        pieces = re.split(r"(?=^# [\w/]+\.py(?:, |$))", block, flags=re.MULTILINE)
        for first, _, code in (piece.partition("\n") for piece in pieces if piece):
            path, how, anchor = PLACE.match(first).groups()
            file = tree / path
            changed.append(path)
            if how is None:
                assert not file.exists(), f"{path} is there already"
                file.write_text(code)
                continue
            lines = file.read_text().splitlines(keepends=True)
            found = [i for i, line in enumerate(lines) if line.startswith(anchor)]
            assert found, f"{path} has no line that begins with {anchor!r}"
            lines[found[0] : found[0] + 1] = [code] if how == "in place of" else [lines[found[0]], code]
            file.write_text("".join(lines))
    return changed


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The repository's code and the tests' helpers with all examples added."""
    tree = tmp_path_factory.mktemp("contributing")
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in ("megarl", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    shutil.copy(ROOT / "pyproject.toml", tree)
    changed = follow(tree)
    assert len(set(changed)) >= 8
    style = [f"{ROOT}/.venv/bin/ruff", "check", "--quiet", *set(changed)]
    result = subprocess.run(style, cwd=tree, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout
    return tree


@pytest.fixture
def folder(tmp_path, toy_folder):
    """A working directory with base.yaml, its model and its data."""
    (tmp_path / "toy").symlink_to(toy_folder)
    model = "device: cpu\nmodel: {path: toy/model, dtype: float32}\n"
    data = "data: {train: toy/train.jsonl, prompt_key: question, answer_key: answer, max_prompt_tokens: 64}\n"
    rest = "rollout: {sampling: {max_new_tokens: 8}}\nrewards: {num_workers: 1}\n"
    (tmp_path / "base.yaml").write_text(model + data + rest)
    return tmp_path


def python(tree: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """With the tree's megarl in place of this one's."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree}/tests"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_reward_scores_what_a_run_logged(tree, folder):
    [command] = re.findall(r"^megarl (reward CONFIG .*)$", TEXT, flags=re.MULTILINE)
    options = [text.replace("CONFIG", "base.yaml").replace("runs/NAME/", "") for text in shlex.split(command)]
    question = json.loads((folder / "toy/train.jsonl").read_text().splitlines()[0])["question"]
    row = {"step": 1, "group": 0, "messages": [{"role": "user", "content": question}], "answer": "7"}
    row |= {"status": "completed", "source": "toy/train.jsonl:1"}
    rows = [row | {"response": text} for text in ("The answer is 7", "7", " The answer: 8")]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = python(tree, folder, "-m", "megarl", *options)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("3 responses, 0 rewards failed\n")
    [mean] = re.findall(r"^reward +(\S+)", result.stdout, flags=re.MULTILINE)
    assert float(mean) == pytest.approx(2 / 3, abs=1e-3)


def test_the_advantage_is_a_preset_that_the_config_takes_and_that_computes(tree, folder):
    result = python(tree, folder, "-c", MEDIANS)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[-1.0, 0.0, 3.0] token_mean\n"


def test_the_model_family_has_the_tensors_of_a_model_of_transformers(tree, tmp_path):
    folder = write_hf_model(tmp_path, "seed_oss", tied=False)
    result = python(tree, folder, "-c", SIZES, str(folder))
    assert result.returncode == 0, result.stderr
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert json.loads(result.stdout) == {name: file.get_slice(name).get_shape() for name in file.keys()}


@pytest.mark.soak
def test_the_model_family_computes_what_transformers_does(tree, tmp_path):
    tests = [f"{tree}/tests/engine/test_parity.py", "-k", "seed_oss", "-q", "--basetemp", str(tmp_path / "parity")]
    result = python(tree, tree, "-m", "pytest", "-p", "no:cacheprovider", *tests)
    assert result.returncode == 0 and re.search(r"^2 passed", result.stdout, flags=re.MULTILINE), result.stdout


def test_what_it_says_of_files_and_commands_is_there():
    for path in re.findall(r"\b(?:bash |in |to )?((?:megarl|tests|launch)/[\w/]+\.(?:py|sh))\b", TEXT):
        assert (ROOT / path).exists() or path in ("megarl/rewards/starts_with.py", "megarl/engine/hf/seed_oss.py"), path
