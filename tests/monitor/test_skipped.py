import pytest
import torch

from megarl.config import Config
from megarl.errors import RunError
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.skipped import SkippedUpdates, nonfinite_fields, why_skipped
from megarl.sample import Prompt, Sample


@pytest.fixture
def run(tmp_path):
    settings = {"name": "x", "run_directory": str(tmp_path), "model": {"path": "m"}, "data": {"train": "t"}}
    with RunDirectory(Config.model_validate(settings), [], "cpu") as directory:
        yield directory


def samples():
    made = [Sample.from_response(Prompt([], [1, 2]), [3, 4], group_id=0, index=i) for i in range(2)]
    for sample in made:
        sample.old_logprobs = torch.tensor([0.0, 0.0, -1.0, -2.0])
    return made


def test_each_skipped_batch_is_kept_and_the_run_stops_beyond_the_limit(run):
    with Console() as console:
        skipped = SkippedUpdates(2, run, console)
        skipped.add("step_000005", samples(), "the loss is nan")
        skipped.add("step_000005", samples(), "the loss is nan")
        with pytest.raises(
            RunError, match="(?s)step_000007: the loss is inf.*trainer.max_skipped_updates: 2 were allowed"
        ):
            skipped.add("step_000007", samples(), "the loss is inf")
    files = sorted(file.name for file in (run.path / "skipped").iterdir())
    assert files == ["step_000005_1.pt", "step_000005_2.pt", "step_000007_3.pt"]
    kept = torch.load(run.path / "skipped" / files[2], weights_only=False)
    assert [sample.token_ids.tolist() for sample in kept] == [[1, 2, 3, 4]] * 2
    assert torch.equal(kept[0].old_logprobs, samples()[0].old_logprobs)


def test_logprobs_are_counted_where_they_are_trained():
    two = samples()
    two[0].old_logprobs[0] = float("nan")  # of the prompt
    assert nonfinite_fields(two) == 0
    two[0].old_logprobs[3] = float("nan")
    two[1].rollout_logprobs = torch.tensor([0.0, 0.0, -torch.inf, -1.0])
    assert nonfinite_fields(two) == 2


def test_the_reason_has_the_numbers():
    result = {"nonfinite_logprobs": 0.0, "loss": 0.5, "grad_norm": float("inf")}
    assert why_skipped(result) == "the loss is 0.5 and the gradient norm inf"
    assert why_skipped(result | {"nonfinite_logprobs": 3.0}).startswith(
        "3 log-probs or values are not finite, the loss"
    )
