"""tools/make_preferences.py: logged samples to pairs that load again, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import DataConfig
from megarl.data import chat, toy
from megarl.data.responses import load_responses
from megarl.errors import ConfigError
from megarl.make_preferences import write_pairs

TOOL = Path(__file__).parents[1] / "tools" / "make_preferences.py"
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 4?"}]


def row(step, group, response, reward, status="completed", **fields):
    about = {"messages": MESSAGES, "response": response, "reward": reward, "status": status, "answer": "7"}
    return {"step": step, "group": group, **about} | fields


def run_with(tmp_path, rows, group_size=2):
    """A run directory with these samples; a string is a line as it is."""
    lines = [line if isinstance(line, str) else json.dumps(line) for line in rows]
    (tmp_path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "config.yaml").write_text(f"name: test\nalgorithm: {{group_size: {group_size}}}\n")
    return tmp_path


def pairs(tmp_path, rows, margin=0.5, group_size=2, **steps):
    """(the rows written, the line about them)."""
    line = write_pairs(run_with(tmp_path, rows, group_size), tmp_path / "pairs.jsonl", margin, **steps)
    text = (tmp_path / "pairs.jsonl").read_text(encoding="utf-8")
    return [json.loads(pair) for pair in text.split("\n") if pair], line


def test_the_best_of_a_group_against_its_worst_and_of_equal_ones_the_first(tmp_path):
    rewards = [("b", 0.5), ("d", 0.0), ("a", 1.0), ("e", 0.0), ("c", 1)]
    rows = [row(1, 0, text, reward) for text, reward in rewards]
    rows += [row(1, 1, "x", 2.0, source="train.jsonl:9"), row(2, 0, "y", 0.3)]
    rows += [row(1, 1, "z", -1.0, source="train.jsonl:9"), row(2, 0, "w", 0.8)]
    written, _ = pairs(tmp_path, rows)
    keys = ("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward", "step", "source")
    values = [("a", "d", 1.0, 0.0, 1), ("x", "z", 2.0, -1.0, 1, "train.jsonl:9"), ("w", "y", 0.8, 0.3, 2)]
    assert written == [dict(zip(keys, (MESSAGES, *row))) for row in values]


def test_what_makes_no_pair_is_counted(tmp_path):
    rows = [row(1, 0, "a", 1.0), row(1, 0, "b", 0.0)]
    rows += [row(1, 1, "a", 0.6), row(1, 1, "b", 0.2)]
    rows += [row(1, 2, "a", 1.0), row(1, 2, "a", 0.0)]
    rows += [row(1, 3, "a", 1.0), row(1, 3, "b", 0.0, "truncated"), row(1, 3, "c", 0.0, "aborted"), row(1, 3, " ", 0.0)]
    rows += [row(1, 4, "a", 1.0, "truncated"), row(1, 4, "", 0.0)]
    written, line = pairs(tmp_path, rows)
    assert len(written) == 1
    assert line == (
        f"wrote {tmp_path / 'pairs.jsonl'}; 5 groups: 1 pairs, 0 incomplete groups, 1 below the margin 0.5, "
        "1 of equal texts, 1 with a single response, 1 with none; left out: 2 truncated responses, 1 aborted, 2 blank"
    )


def test_groups_that_were_not_logged_whole_are_left_out_with_the_key_that_logs_all(tmp_path):
    rows = [row(1, group, text, reward) for group in (0, 1) for text, reward in (("a", 1.0), ("b", 0.0), ("c", 0.5))]
    written, line = pairs(tmp_path, rows[:-1], group_size=3)
    assert len(written) == 1 and "2 groups: 1 pairs, 1 incomplete groups" in line
    assert line.endswith(
        "incomplete have fewer logged responses than algorithm.group_size = 3: trainer.num_logged_samples=null logs "
        "all responses of a run, but for those whose reward failed"
    )


def test_steps_are_taken_from_first_to_last(tmp_path):
    rows = [row(step, 0, text, reward) for step in (1, 2, 3, 4) for text, reward in (("a", 1.0), ("b", 0.0))]
    written, _ = pairs(tmp_path, rows, first_step=2, last_step=3)
    assert [pair["step"] for pair in written] == [2, 3]
    with pytest.raises(ConfigError, match="no samples of the steps asked for; the file holds steps 1 to 4"):
        write_pairs(tmp_path, tmp_path / "none.jsonl", 0.5, first_step=5)


def test_a_run_without_samples_or_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="samples.jsonl: no samples; trainer.num_logged_samples=null logs all"):
        pairs(tmp_path, [])
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match="config.yaml: no such file"):
        write_pairs(tmp_path, tmp_path / "none.jsonl", 0.5)


def test_written_pairs_load_with_the_prompt_of_the_run_and_one_system_prompt(tmp_path):
    toy.make(tmp_path / "toy", seed=0)
    tokenizer = chat.load_tokenizer(tmp_path / "toy" / "model")
    rows = [row(1, 0, "3 + 4 = 7\u2028é", 1.0, source="train.jsonl:1"), row(1, 0, "I guess 9", 0.0)]
    pairs(tmp_path, rows)
    settings = DataConfig(train="unused", system_prompt="Another.")
    keys = ("chosen_key", "rejected_key")
    chosen, rejected = load_responses(tmp_path / "pairs.jsonl", settings, tokenizer, 256, keys)
    assert chosen.prompt.messages == rejected.prompt.messages == MESSAGES
    assert tokenizer.decode(chosen.token_ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
        "3 + 4 = 7\u2028é<|im_end|>"
    )
    assert rejected.response_text == "I guess 9" and chosen.prompt.metadata["source_column"] == "train.jsonl:1"


def test_every_wrong_line_is_named(tmp_path):
    good = row(1, 0, "a", 1.0)
    rows = [good, "{"]
    rows += [{key: value for key, value in good.items() if key != missing} for missing in ("group", "messages")]
    rows += [good | {"reward": reward} for reward in (None, float("nan"))]
    wrong = {"status": "done", "response": 3, "step": True, "messages": MESSAGES[1:]}
    rows += [good | {key: value} for key, value in wrong.items()]
    with pytest.raises(ConfigError, match=r"9 error\(s\)") as error:
        pairs(tmp_path, rows)
    lines = [line.partition("samples.jsonl:")[2] for line in str(error.value).splitlines()[1:]]
    starts = ["2: not JSON", "3: group: given None", "4: messages", "5: reward: given None", "6: reward: given nan",
              "7: status", "8: response: given 3", "9: step", "10: group 0 of step 1 has two prompts"]  # fmt: skip
    for line, start in zip(lines, starts, strict=True):
        assert line.startswith(start), line
    assert not (tmp_path / "pairs.jsonl").exists()


def test_a_run_that_logged_a_few_samples_is_refused_with_the_key_that_logs_all(tmp_path):
    with pytest.raises(ConfigError, match="no pair to write; 2 groups: 0 pairs, 2 incomplete groups.*"
                       "trainer.num_logged_samples=null logs all"):  # fmt: skip
        pairs(tmp_path, [row(1, 0, "a", 1.0), row(2, 0, "b", 0.0)])
    assert not (tmp_path / "pairs.jsonl").exists()


def test_the_tool_prints_what_it_wrote_and_never_overwrites(tmp_path):
    run_with(tmp_path, [row(1, 0, "a", 0.4), row(1, 0, "b", 0.0)])
    command = [sys.executable, TOOL, tmp_path, tmp_path / "new" / "pairs.jsonl", "--margin", "0.4"]
    first, second = (subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(2))
    assert first.returncode == 0 and "1 groups: 1 pairs" in first.stdout, first.stderr
    assert second.returncode == 2 and second.stderr.endswith("pairs.jsonl exists already; pairs never overwrite\n")
    assert len((tmp_path / "new" / "pairs.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("margin", [0.0, -1.0, float("nan")])
def test_a_margin_that_is_not_above_0_is_refused(tmp_path, margin):
    with pytest.raises(ConfigError, match="--margin .*: wanted a number above 0"):
        pairs(tmp_path, [row(1, 0, "a", 1.0), row(1, 0, "b", 0.0)], margin)
