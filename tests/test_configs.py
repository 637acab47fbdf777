"""The configs for real models: every command of their comments is accepted and prints what they say it prints."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl import cli
from megarl.config import Config, describe, load
from megarl.config_describe import needs
from megarl.data.messages import parse_messages
from megarl.data.sources import read_source

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from shapes import SHAPES  # noqa: E402

FILES = sorted(file.name for file in (ROOT / "configs").glob("*qwen*.yaml"))
MACHINES = {"1gpu": 1, "8gpu": 8, "2nodes": 16, "4nodes": 32}
CONVERSATION = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Yes."}]
ROWS = {  # with the columns of the released files
    "gsm8k/main": {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"},
    "dapo_math/en": {
        "prompt": "What is 2 + 3?",
        "solution": "5",
        "data_source": "math_dapo",
        "source_prompt": CONVERSATION[:1],
        "ability": "MATH",
        "reward_model": {"ground_truth": "5", "style": "rule"},
        "extra_info": {"index": "0"},
    },
    "ultrafeedback/data": {
        "prompt": "Say yes.",
        "prompt_id": "0",
        "chosen": CONVERSATION,
        "rejected": [CONVERSATION[0], {"role": "assistant", "content": "No."}],
        "messages": CONVERSATION,
        "score_chosen": 9.0,
        "score_rejected": 2.0,
    },
}


@pytest.fixture(scope="module")
def downloads(tmp_path_factory) -> Path:
    """A working directory with the models' config.json and a few rows of the data, where the comments put them."""
    folder = tmp_path_factory.mktemp("downloads")
    for name, shape in SHAPES.items():
        for path in (folder / "models" / name, folder / "models" / f"{name}-instruct"):
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(shape))
            (path / "model.safetensors").touch()
            (path / "tokenizer.json").touch()
    for place, row in ROWS.items():
        (folder / "data" / place).mkdir(parents=True)
        suffix = "_prefs" if place.startswith("ultrafeedback") else ""
        for split in ("train", "test"):
            write_rows(folder / "data" / place / f"{split}{suffix}-00000-of-00001.parquet", [row, row])
    (folder / "data" / "problems.jsonl").write_text(json.dumps({"problem": "What is 2 + 3?", "answer": "5"}) + "\n")
    shutil.copytree(ROOT / "configs", folder / "configs")
    make_pairs(folder)
    return folder


def write_rows(file: Path, rows: list[dict]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def make_pairs(folder: Path) -> None:
    """As the comments of the config for DPO do, with a row that has nothing to prefer and one without a response."""
    file = folder / "data/ultrafeedback/data/train_prefs-00000-of-00001.parquet"
    row = ROWS["ultrafeedback/data"]
    empty = [CONVERSATION[0], {"role": "assistant", "content": ""}]
    write_rows(file, [row, row | {"rejected": CONVERSATION}, row | {"rejected": empty}])
    text = (ROOT / "configs/dpo_qwen2.5_1.5b.yaml").read_text()
    lines = text.split("#   python - <<'END'\n")[1].split("#   END\n")[0].splitlines()
    script = textwrap.dedent("\n".join(line.removeprefix("#") for line in lines))
    subprocess.run([sys.executable, "-"], input=script, text=True, cwd=folder, check=True)


@pytest.fixture
def folder(downloads, monkeypatch) -> Path:
    monkeypatch.chdir(downloads)
    return downloads


def commands(file: str) -> list[tuple[str, list[str]]]:
    """(`megarl train ...`, what the comments say it prints) in the order of the comments: a line that ends with a
    backslash goes on in the next one, and what is printed stands behind `#>`."""
    found: list[tuple[str, list[str]]] = []
    goes_on = False
    for line in (ROOT / "configs" / file).read_text().splitlines():
        if line.startswith("#   megarl train ") or goes_on:
            text = line.removeprefix("#").strip()
            goes_on = text.endswith("\\")
            text = text.removesuffix("\\").strip()
            if text.startswith("megarl train "):
                found.append((text, []))
            else:
                found[-1] = (f"{found[-1][0]} {text}", [])
        elif line.startswith("#> "):
            found[-1][1].append(line.removeprefix("#> "))
    return found


def loaded(command: str) -> Config:
    """As `--dry-run` does."""
    options = cli.parse([*shlex.split(command)[1:], "--dry-run"])
    return load(options.config, options.overrides, to_run=False)


@pytest.mark.parametrize("file", FILES)
def test_every_command_is_accepted_and_prints_what_the_comments_say(folder, file):
    found = commands(file)
    assert shlex.split(found[0][0])[2] == f"configs/{file}", "the first command is the plain one"
    for command, said in found:
        text = describe(loaded(command))
        lines = [line.removeprefix("# ") for line in text.splitlines()]
        wrong = [line for line in said if line not in lines]
        assert not wrong, "\n".join([command, "does not print", *wrong, "but", *lines_of(command)])
        assert "DOES NOT FIT" not in text, command
    assert [line for line in lines_of(found[0][0]) if line not in found[0][1]] == []


def lines_of(command: str) -> list[str]:
    """What the comments must say of the plain command: its batch, and the memory of every role."""
    lines = [line.removeprefix("# ") for line in describe(loaded(command)).splitlines()]
    memory = lines[next(i for i, line in enumerate(lines) if line.startswith("GPU memory, estimated")) + 1 :]
    return [
        line for line in lines if re.match(r"(data parallel size|(samples|updates|tokens) per (step|round)) ", line)
    ] + memory


@pytest.mark.parametrize("file", [file for file in FILES if re.search("gpu|nodes", file)])
def test_a_config_needs_the_machine_that_its_name_says(folder, file):
    machine = Path(file).stem.split("_")
    wanted = next(MACHINES[part] for part in machine if part in MACHINES)
    assert needs(loaded(f"megarl train configs/{file}"), gpus_per_rank=1)[-1][2] == wanted


def test_all_sizes_machines_and_placements_are_there(folder):
    found = set()
    for command in (command for file in FILES for command, _ in commands(file)):
        config = loaded(command)
        model = re.sub("-instruct$", "", Path(config.model.path).name)
        placement = config.placement if config.servers else None
        found.add((config.algorithm.name, model, int(needs(config, gpus_per_rank=1)[-1][2]), placement))
    for algorithm in ("grpo", "ppo"):
        for model in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"):
            machines = ((1, "colocated"), (8, "colocated"), (8, "disaggregated"))
            assert {(algorithm, model, *machine) for machine in machines} <= found
        assert {
            (algorithm, "qwen2.5-32b", 16, "disaggregated"),
            (algorithm, "qwen3-30b-a3b", 32, "disaggregated"),
        } <= found
    assert ("dapo", "qwen2.5-7b", 8, "colocated") in found
    assert {(name, "qwen2.5-1.5b", 1, None) for name in ("sft", "dpo", "reward_model")} <= found


def test_their_keys_name_columns_of_the_released_files(folder):
    for command in (command for file in FILES for command, _ in commands(file)):
        config = loaded(command)
        data, algorithm = config.data, config.algorithm
        texts = [data.answer_key]
        if algorithm.is_supervised:
            texts = [data.chosen_key, data.rejected_key] if algorithm.has_pairs else [data.response_key]
        for source in [*data.train, *(data.validation or [])]:
            errors: list[str] = []
            rows = list(read_source(source, errors))
            assert rows, source
            for place, row in rows:
                assert parse_messages(row, place, data, errors), errors
                assert all(isinstance(row[key], str) and row[key] for key in texts), (command, row)
            assert not errors


def test_the_pairs_have_no_row_that_dpo_would_refuse(folder):
    pairs = pyarrow.parquet.read_table("data/ultrafeedback/train.parquet").to_pylist()
    assert [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in pairs] == [
        {"prompt": "Say yes.", "chosen": "Yes.", "rejected": "No."}
    ]


def test_the_command_line_says_the_same(folder):
    command = [sys.executable, "-m", "megarl", "train", "configs/grpo_qwen2.5_7b_1gpu.yaml", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == describe(loaded("megarl train configs/grpo_qwen2.5_7b_1gpu.yaml"))
