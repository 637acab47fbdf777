"""What a run writes into its folder."""

import json
from types import SimpleNamespace

from megarl.config import Config
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
    assert about["earlier"][0]["resumed_from"] is None and len({about["run_id"], *(e["run_id"] for e in about["earlier"])}) == 3
