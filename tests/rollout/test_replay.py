"""What servers generated, kept in a folder, and trained on again without them."""

import inspect
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from saving import config_of
from scoring import scorer

from megarl.collect import Collector
from megarl.config import Config
from megarl.data.stream import PromptStream
from megarl.errors import ConfigError, RunError
from megarl.rollout.fleet import Fleet
from megarl.rollout.replay import Recording, Replay, check_recordings, round_name, validation_name
from megarl.sample import Prompt, Sample, Status

RESUMED = SimpleNamespace(step=2, in_place=True, state={"is_validated": True})


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt([], [i, 7], metadata={"source": f"t:{i + 1}", "number": i}) for i in range(count)]


def generated(prompts: list[Prompt], group_size: int, version: int = 0) -> list[Sample]:
    """Of every third prompt all are completed."""
    samples = []
    for group_id, prompt in enumerate(prompts):
        for i in range(group_size):
            status = Status.TRUNCATED if i and prompt.metadata["number"] % 3 else Status.COMPLETED
            made = Sample.from_response(prompt, [8, i], group_id=group_id, index=len(samples), status=status)
            made.policy_version, made.rollout_logprobs = (version, version), -0.1 * made.token_ids.float()
            samples.append(made)
    return samples


def record(folder: Path, *names: str) -> None:
    for name in names:
        Recording(folder).save(name, generated(prompts_of(2), 2))


def test_what_was_generated_comes_again(tmp_path):
    prompts = prompts_of(3)
    before = generated(prompts, 2, version=4)
    Recording(tmp_path / "a/b").save("step_000005_round_1", before)
    with Replay(Recording(tmp_path / "a/b")) as replay:
        replay.push(version=4)
        after = replay.generate("step_000005_round_1", prompts, 2, None, 0.5, [[1, 2]] * 3)
    for first, second in zip(before, after, strict=True):
        assert second.prompt is first.prompt and second.policy_version == (4, 4) and second.group_id == first.group_id
        assert second.token_ids.equal(first.token_ids) and second.rollout_logprobs.equal(first.rollout_logprobs)
    assert replay.version == 4 and replay.restarts == 0


def test_it_is_called_as_the_fleet_is():
    methods = [name for name, value in vars(Replay).items() if inspect.isfunction(value) and name[0] != "_"]
    assert {"generate", "push", "make_room", "stop"} <= set(methods)
    for name in methods:
        asked, wanted = (inspect.signature(getattr(kind, name)).parameters for kind in (Replay, Fleet))
        assert list(asked) == list(wanted), name
        assert [p.default for p in asked.values()] == [p.default for p in wanted.values()], name


def test_other_prompts_numbers_or_names_are_refused(tmp_path):
    prompts, recording = prompts_of(4), Recording(tmp_path)
    recording.save("step_000001_round_1", generated(prompts[:3], 2))
    for asked, group_size, message in (
        (prompts[:2], 2, "step_000001_round_1.jsonl:5: its prompt is from t:3, but here comes t:2"),
        (prompts[1:], 2, "step_000001_round_1.jsonl:1: its prompt is from t:1, but here comes t:2"),
        (prompts[:3], 1, "step_000001_round_1.jsonl:2: its prompt is from t:1, but here comes t:2"),
        (prompts, 2, "step_000001_round_1.jsonl has 6 samples, wanted 4 prompts x 2"),
        (prompts[:3], 3, "step_000001_round_1.jsonl:3: its prompt is from t:2, but here comes t:1"),
    ):
        with pytest.raises(RunError, match=message):
            recording.load("step_000001_round_1", asked, group_size)
    with pytest.raises(RunError, match="rollout.replay: .*step_000001_round_2.jsonl does not exist"):
        recording.load("step_000001_round_2", prompts, 2)


def test_a_recording_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="rollout.save: .*step_000001_round_1.jsonl cannot be written: Not a directory"):
        record(tmp_path / "file/below", round_name(1, 1))


# What there must be, and what must not


def refusal(config: Config, resume=None) -> str:
    with pytest.raises(ConfigError) as error:
        check_recordings(config, resume)
    return str(error.value)


def test_recordings_are_overwritten_by_the_run_that_made_them_alone(tmp_path):
    config = config_of(tmp_path, rollout={"save": str(tmp_path / "r")})
    check_recordings(config, None)
    record(tmp_path / "r", round_name(1, 1), round_name(2, 1))
    expected = f"rollout.save: {tmp_path}/r holds 2 recordings already, among them step_000001_round_1.jsonl"
    assert refusal(config) == expected
    assert refusal(config, SimpleNamespace(step=2, in_place=False)) == expected  # from another run's checkpoint
    check_recordings(config, RESUMED)


def test_what_a_resumed_run_generates_anew_is_forgotten(tmp_path):
    names = [round_name(2, 1), round_name(3, 1), round_name(3, 2), round_name(10, 1)]
    record(tmp_path, *names, validation_name(2), validation_name(3), "mine")
    Recording(tmp_path).forget_after(2)
    Recording(tmp_path / "none").forget_after(2)
    assert sorted(os.listdir(tmp_path)) == ["mine.jsonl", "step_000002_round_1.jsonl", "validation_000002.jsonl"]


def test_recordings_that_lack_are_named_before_the_start(tmp_path):
    trainer = {"steps": 10, "evaluate_every": 4}
    data = {"train": "t", "validation": "v"}
    config = config_of(tmp_path, rollout={"replay": str(tmp_path / "r")}, trainer=trainer, data=data)
    names = [round_name(step, 1) for step in range(1, 11)] + [validation_name(step) for step in (0, 4, 8, 10)]
    shown = ", ".join(names[:5])
    assert refusal(config) == f"rollout.replay: {tmp_path}/r lacks {shown} and 9 more (.jsonl)"
    record(tmp_path / "r", *names)
    check_recordings(config, None)
    for missing in (round_name(7, 1), validation_name(0), validation_name(8)):
        (tmp_path / f"r/{missing}.jsonl").unlink()
        assert refusal(config) == f"rollout.replay: {tmp_path}/r lacks {missing} (.jsonl)"
        record(tmp_path / "r", missing)


def test_of_a_resumed_run_only_later_steps_are_needed_and_the_validation_that_it_owes(tmp_path):
    trainer, data = {"steps": 3, "evaluate_every": 2}, {"train": "t", "validation": "v"}
    config = config_of(tmp_path, rollout={"replay": str(tmp_path / "r")}, trainer=trainer, data=data)
    record(tmp_path / "r", round_name(3, 1), validation_name(3))
    check_recordings(config, RESUMED)
    owing = SimpleNamespace(step=2, in_place=True, state={"is_validated": False})
    assert refusal(config, owing).endswith("lacks validation_000002 (.jsonl)")


def test_a_run_that_stopped_early_recorded_no_more(tmp_path):
    sections = {"rollout": {"replay": str(tmp_path / "r")}, "data": {"train": "t", "validation": "v"}}
    names = [round_name(step, 1) for step in (1, 2, 3, 4)] + [validation_name(step) for step in (0, 2, 4)]
    record(tmp_path / "r", *names)
    trainer = {"steps": 9, "evaluate_every": 2}
    stopping = config_of(tmp_path, trainer=trainer | {"early_stop": {}}, **sections)
    check_recordings(stopping, None)
    assert "lacks step_000005_round_1" in refusal(config_of(tmp_path, trainer=trainer, **sections))
    (tmp_path / f"r/{round_name(3, 1)}.jsonl").unlink()
    assert refusal(stopping).endswith("lacks step_000003_round_1 (.jsonl)")
    nothing = config_of(tmp_path, trainer=trainer | {"early_stop": {}}, rollout={"replay": "no"})
    assert "lacks step_000001_round_1" in refusal(nothing)


# Dynamic sampling


class Recorded:
    """In the place of servers; what they generate is kept."""

    def __init__(self, recording: Recording):
        self.recording, self.version, self.names = recording, 0, []

    def generate(self, name, prompts, group_size, tokenizer, temperature=None, seeds=None):
        samples = generated(prompts, group_size, self.version)
        self.recording.save(name, samples)
        self.names.append(name)
        return samples


def steps_of(config: Config, fleet, num_steps: int) -> list[list[tuple]]:
    inputs = SimpleNamespace(stream=PromptStream(prompts_of(10), 1), vocab_size=8, tokenizer=None)
    collector, steps = Collector(config, inputs, fleet, scorer("completed")), []
    for step in range(1, num_steps + 1):
        fleet.version = step - 1
        samples, every, metrics = collector.next(step, {})
        rows = [(s.group_id, s.index, s.prompt.metadata["number"], s.reward, s.policy_version) for s in samples]
        steps.append((rows, len(every), metrics["dynamic_sampling/rounds"]))
    return steps


def test_rounds_of_dynamic_sampling_come_again_each_by_its_name(tmp_path):
    algorithm = {"prompts_per_step": 4, "group_size": 2, "reward": "completed", "dynamic_sampling": {}}
    config = config_of(tmp_path, algorithm=algorithm, rollout={"save": str(tmp_path)})
    fleet = Recorded(Recording(tmp_path))
    expected = steps_of(config, fleet, 5)
    assert len(fleet.names) > 5 and "step_000001_round_2" in fleet.names and len(set(fleet.names)) == len(fleet.names)
    again = config_of(tmp_path, algorithm=algorithm, rollout={"replay": str(tmp_path)})
    replay = Replay(Recording(tmp_path))
    assert steps_of(again, replay, 5) == expected
    (tmp_path / "step_000001_round_2.jsonl").unlink()  # which nobody can know before
    with pytest.raises(RunError, match="step_000001_round_2.jsonl does not exist"):
        steps_of(again, replay, 5)
