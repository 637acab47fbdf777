"""What a run writes into its folder."""

import json
from types import SimpleNamespace

import pytest

from megarl.checkpoint.folder import checkpoints_of, step_of
from megarl.config import Config
from megarl.errors import ConfigError
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Prompt, Sample


def directory(folder, resume=None):
    settings = {"name": "x", "run_directory": str(folder), "model": {"path": "m"}, "data": {"train": "t"}}
    return RunDirectory(Config.model_validate(settings), [], "cpu", resume)


def test_dropped_samples_are_written_with_the_reason_to_a_file_that_is_there_only_where_there_are_some(tmp_path):
    prompt = Prompt([], [1], answer="5", metadata={"source": "train.jsonl:7"})
    sample = Sample.from_response(prompt, [2], group_id=3, index=0, response_text="five")
    with directory(tmp_path) as run:
        run.log_failed(1, [])
        assert not (run.path / "failed_rewards.jsonl").exists()
        run.log_failed(2, [(sample, "took too long")])
        run.log_failed(4, [(sample, "raised ValueError: no")])
    rows = [json.loads(line) for line in (run.path / "failed_rewards.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 2, "group": 3, "source": "train.jsonl:7", "response": "five", "answer": "5",
                       "error": "took too long"}  # fmt: skip
    assert [row["step"] for row in rows] == [2, 4]


def test_a_resumed_run_keeps_the_lines_of_its_steps_and_sets_the_later_ones_aside(tmp_path):
    lines = [{"warm_start/step": 1}, {"step": 1}, {"step": 2}, {"step": 2, "validation/reward_mean": 1.0}, {"step": 3}]
    with directory(tmp_path) as run:
        for line in lines:
            run.log_metrics(line)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "cut')  # by a power failure
    for name in ("step_000002", "step_000003", "step_000004.partial"):
        (run.path / "checkpoints" / name).mkdir()
    resume = SimpleNamespace(step=2, folder=run.path / "checkpoints/step_000002")
    for _ in range(2):
        with directory(tmp_path, resume) as run:
            run.log_metrics({"step": 3, "again": 1})
    kept = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [*lines[:4], {"step": 3, "again": 1}]
    aside = (run.path / "metrics.superseded.jsonl").read_text().splitlines()
    assert aside == ['{"step": 3}', '{"step": 4, "cut', '{"step": 3, "again": 1}']
    names = sorted(folder.name for folder in (run.path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003.superseded_1"]
    about = json.loads((run.path / "env.json").read_text())
    assert about["resumed_from"].endswith("step_000002") and len(about["earlier"]) == 2
    assert (
        about["earlier"][0]["resumed_from"] is None
        and len({about["run_id"], *(e["run_id"] for e in about["earlier"])}) == 3
    )


ODD = "a\u2028b\u2029c\x85d\x1ce\rf\ud800g 😀"  # ends of lines to Python's text, and half a character


def log_odd(run, step):
    prompt = Prompt([{"role": "user", "content": ODD}], [1], answer=ODD, metadata={"source": ODD})
    sample = Sample.from_response(prompt, [2], group_id=3, index=0, response_text=ODD)
    run.log_samples(step, [sample])
    run.log_failed(step, [(sample, ODD)])


def test_text_with_other_ends_of_lines_stays_in_its_line_through_a_resume(tmp_path):
    with directory(tmp_path) as run:
        for step in (1, 2, 3):
            log_odd(run, step)
    before = {name: (run.path / name).read_bytes() for name in ("samples.jsonl", "failed_rewards.jsonl")}
    with directory(tmp_path, SimpleNamespace(step=2, folder=run.path)):
        pass
    for name, content in before.items():
        lines = content.splitlines(keepends=True)
        kept, moved = (run.path / name, (run.path / name).with_suffix(".superseded.jsonl"))
        assert kept.read_bytes() == b"".join(lines[:2]) and moved.read_bytes() == lines[2]
        assert [json.loads(line)["response"] for line in lines] == [ODD] * 3


def test_lines_that_are_broken_are_set_aside_wherever_they_are(tmp_path):
    with directory(tmp_path) as run:
        run.log_metrics({"step": 1})
    good = (run.path / "metrics.jsonl").read_bytes()
    broken = [b"\0\0\0\0\n", b'{"step": 1, "cut\n', b"[]\n", b"\xff\n", b"\n", b'{"step": 1}']
    (run.path / "metrics.jsonl").write_bytes(b"".join(broken[:5]) + good + broken[5])
    with directory(tmp_path, SimpleNamespace(step=1, folder=run.path)):
        pass
    assert (run.path / "metrics.jsonl").read_bytes() == good
    assert (run.path / "metrics.superseded.jsonl").read_bytes() == b"".join(broken) + b"\n"
    assert not list(run.path.glob("*.kept"))


def test_a_run_that_begins_again_sets_all_checkpoints_aside_and_one_that_goes_on_the_later_ones(tmp_path):
    for resume, aside, stays in ((SimpleNamespace(step=0, folder=tmp_path), [4, 2], [0]), (None, [0], [])):
        for step in (0, 2, 4) if resume else ():
            (tmp_path / f"x/checkpoints/step_{step:06d}").mkdir(parents=True)
        with directory(tmp_path, resume) as run:
            assert [folder.name for folder in run.set_aside] == [f"step_{step:06d}.superseded_1" for step in aside]
        assert [step_of(folder) for folder in checkpoints_of(run.path)] == stays


def test_a_run_that_has_not_ended_is_not_taken_over(tmp_path):
    with directory(tmp_path) as run:
        run.log_metrics({"step": 1})
        with pytest.raises(ConfigError, match="x is in use by a run that has not ended"):
            directory(tmp_path, SimpleNamespace(step=0, folder=tmp_path))
    assert json.loads((run.path / "metrics.jsonl").read_text()) == {"step": 1}
    with directory(tmp_path, SimpleNamespace(step=1, folder=tmp_path)):
        pass
