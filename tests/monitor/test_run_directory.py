"""What a run writes into its folder."""

import json
from types import SimpleNamespace

import pytest

from megarl.config import Config
from megarl.data.stream import PromptStream
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Prompt, Sample


def directory(folder, **data):
    settings = {"name": "x", "run_directory": str(folder), "model": {"path": "m"}, "data": {"train": "t"} | data}
    return RunDirectory(Config.model_validate(settings), [], "cpu")


def test_dropped_samples_are_written_with_the_reason_to_a_file_that_is_there_only_where_there_are_some(tmp_path):
    run = directory(tmp_path)
    prompt = Prompt([], [1], answer="5", metadata={"source": "train.jsonl:7"})
    sample = Sample.from_response(prompt, [2], group_id=3, index=0, response_text="five")
    run.log_failed(1, [])
    assert not (run.path / "failed_rewards.jsonl").exists()
    run.log_failed(2, [(sample, "took too long")])
    run.log_failed(4, [(sample, "raised ValueError: no")])
    run.close()
    rows = [json.loads(line) for line in (run.path / "failed_rewards.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 2, "group": 3, "source": "train.jsonl:7", "response": "five", "answer": "5",
                       "error": "took too long"}  # fmt: skip
    assert [row["step"] for row in rows] == [2, 4]


@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_checkpoint_gets_the_position_in_the_data_and_a_template_that_is_not_the_models_own(tmp_path, template):
    run = directory(tmp_path, chat_template=template)
    checkpoint = run.checkpoint("step_000001")
    (checkpoint / "hf").mkdir(parents=True)
    rows = PromptStream([Prompt([], [1]), Prompt([], [2])], seed=1)
    rows.next(1)
    run.complete(checkpoint, rows, SimpleNamespace(chat_template="{{ 'é' }}"))
    run.close()
    assert json.loads((checkpoint / "data.json").read_text()) == rows.state_dict()
    written = [path.read_text(encoding="utf-8") for path in (checkpoint / "hf").iterdir()]
    assert written == ([] if template is None else ["{{ 'é' }}"])
