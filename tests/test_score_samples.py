"""`megarl reward`: what it prints, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from end_to_end import ROOT, Run

from megarl import cli

CONFIG = """device: cpu
model: {path: toy/model, dtype: float32}
data: {train: rows.jsonl, prompt_key: question, max_prompt_tokens: 64}
algorithm: {reward: gsm8k, prompts_per_step: 2, group_size: 2}
rollout: {sampling: {max_new_tokens: 8}}
"""
ROWS = [
    {"question": "Ann has 3 pens and buys 4.", "answer": "7"},
    {"question": "Bob loses 2 of 9 cups.", "answer": "7"},
]


@pytest.fixture
def folder(tmp_path, monkeypatch, toy_folder):
    """The working directory: base.yaml, the toy's model, and rows.jsonl with two prompts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").symlink_to(toy_folder)
    (tmp_path / "base.yaml").write_text(CONFIG)
    write("rows.jsonl", ROWS)
    return tmp_path


def write(name: str, rows: list[dict]) -> None:
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def logged(response: str, group: int = 0, **more) -> dict:
    """A line of samples.jsonl, about the first of ROWS."""
    row = {"step": 1, "group": group, "messages": [{"role": "user", "content": ROWS[0]["question"]}], "answer": "7"}
    return row | {"response": response, "status": "completed", "source": "rows.jsonl:1"} | more


def reward(*arguments: str) -> int:
    return cli.main(["reward", "base.yaml", *arguments])


def test_samples_of_a_run_are_scored_with_their_distribution_parts_and_ends(folder, capsys):
    rows = [logged("#### 7"), logged("#### 8"), logged("#### 9", group=1), logged("#### 7.0", group=1)]
    write("samples.jsonl", rows)
    assert reward("--samples", "samples.jsonl", "algorithm.reward={gsm8k: 1.0, completed: 0.5}") == 0
    out = capsys.readouterr().out
    assert out.startswith("4 responses, 0 rewards failed\n")
    table = [line.split() for line in out.splitlines()[2:6]]
    assert table[0] == ["mean", "std", "min", "median", "max", "distinct"]
    assert table[1] == ["reward", "1", "0.5", "0.5", "1", "1.5", "2"]
    assert table[2] == ["gsm8k", "0.5", "0.5", "0", "0.5", "1", "2"]
    assert table[3] == ["completed", "1", "0", "1", "1", "1", "1"]
    assert "groups: 2, 0 of them with equal rewards" in out and "time for one reward: p50 " in out
    assert "0.5  rows.jsonl:1, answer '7', completed: '#### 8'" in out.partition("lowest")[2]
    assert "1.5  rows.jsonl:1, answer '7', completed: '#### 7.0'" in out.partition("highest")[2]


def test_rows_with_responses_are_scored_too_and_equal_prompts_are_a_group(folder, capsys):
    write("rows_with_responses.jsonl", [ROWS[0] | {"response": text} for text in ("#### 7", "7")])
    assert reward("--samples", "rows_with_responses.jsonl") == 0
    assert "groups: 1, 0 of them with equal rewards" in capsys.readouterr().out


def test_a_logged_sample_has_the_columns_of_its_row_again(folder, capsys):
    (folder / "level_rewards.py").write_text("def level(sample):\n    return sample.prompt.metadata['level']\n")
    write("rows.jsonl", [row | {"level": level} for level, row in enumerate(ROWS, start=3)])
    second = logged("?", 1, messages=[{"role": "user", "content": ROWS[1]["question"]}], source="rows.jsonl:2")
    write("samples.jsonl", [logged("?"), second])
    assert (
        reward("--samples", "samples.jsonl", "algorithm={reward: level_rewards:level, name: reinforce_plus_plus}") == 0
    )
    assert "  4  rows.jsonl:2, answer '7'" in capsys.readouterr().out


def test_a_logged_sample_of_unknown_data_has_what_its_line_says(folder, capsys):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ann has 3 pens."}]
    write("samples.jsonl", [logged(text, messages=messages, source=None) for text in ("#### 7", "#### 8")])
    assert reward("--samples", "samples.jsonl", "data.system_prompt=Think.") == 0
    assert "1  samples.jsonl:1, answer '7', completed: '#### 7'" in capsys.readouterr().out


def test_constant_rewards_are_refused_with_what_to_try(folder, capsys):
    write("samples.jsonl", [logged("7"), logged("8")])
    assert reward("--samples", "samples.jsonl") == 1
    out, err = capsys.readouterr()
    assert "1, 1 of them with equal rewards" in out
    assert err.startswith("megarl: error: all 2 rewards are 0: ") and "warm start" in err


def test_a_reward_that_fails_is_refused_and_the_others_are_shown(folder, capsys):
    (folder / "picky_rewards.py").write_text(
        "def picky(sample):\n    return None if '8' in sample.response_text else 1\n"
    )
    write("samples.jsonl", [logged("7"), logged("8"), logged("9")])
    assert reward("--samples", "samples.jsonl", "algorithm.reward=picky_rewards:picky") == 1
    out, err = capsys.readouterr()
    assert out.startswith("3 responses, 1 rewards failed\n") and "returned None: wanted a finite number" in out
    assert "1 of 3 rewards failed" in err
    logs = Path(out.splitlines()[-1].removeprefix("logs are in "))
    assert (logs / "reward-0.log").is_file()
    shutil.rmtree(logs)


def test_wrong_rows_are_all_named(folder, capsys):
    other = [{"role": "user", "content": "Something else?"}]
    rows = [logged("7", messages=other), {"question": "Why?", "answer": "1"}, {"answer": "1"}]
    rows += [logged("7", status="done"), logged("7", messages="x", source=None), logged(None)]
    write("samples.jsonl", rows)
    assert reward("--samples", "samples.jsonl") == 2
    err = capsys.readouterr().err
    assert "samples.jsonl:1: messages: not those of rows.jsonl:1, which has changed since" in err
    assert "samples.jsonl:2: response: wanted a response's text, given None" in err
    assert "samples.jsonl:3: no column question" in err
    assert "samples.jsonl:4: status: given 'done', valid: completed, truncated, aborted" in err
    assert "samples.jsonl:6: response: wanted a response's text, given None" in err


def test_what_has_no_rewards_and_no_prompts_is_refused(folder, capsys):
    assert reward("--from-model", "0") == 2
    assert "--from-model 0: wanted 1 or more prompts" in capsys.readouterr().err
    supervised = "".join(line for line in CONFIG.splitlines(keepends=True)[:3]) + "algorithm: {name: sft}\n"
    (folder / "base.yaml").write_text(supervised)
    assert reward() == 2
    assert "algorithm.name: sft has no rewards (algorithm.reward)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        reward("--samples", "a.jsonl", "--from-model", "3")


@pytest.mark.soak
def test_responses_of_the_model_are_scored(tmp_path):
    """A toy that was never trained has no right answer: that is said, and nothing is left behind."""
    overrides = ["rollout.server_args={log_level: warning}", "algorithm.reward={last_integer: 1.0, completed: 0.0}"]
    with Run(tmp_path, str(ROOT / "configs/quickstart.yaml"), "--from-model", "3", *overrides, command="reward") as run:
        assert run.wait(300) == 1, run.output
    assert "24 responses, 0 rewards failed" in run.output and "as it is before the warm start" in run.output
    assert "all 24 rewards are 0: " in run.output
