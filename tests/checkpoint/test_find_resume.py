"""From which checkpoint a run goes on, what is refused, and that its data go on in the same order (O15, O16)."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from saving import METRIC, Role, config_of
from scoring import scorer

from megarl.checkpoint import resume
from megarl.checkpoint.best import BestValidation
from megarl.checkpoint.saver import LoopState, Saver
from megarl.collect import Collector
from megarl.config import Config
from megarl.config_file import dump
from megarl.data.stream import PromptStream
from megarl.errors import ConfigError, RunError
from megarl.sample import Prompt, Sample, Status


def prompts_of(count: int, file: str = "t") -> list[Prompt]:
    texts = [[{"role": "user", "content": f"{i} \u2028 {i}"}] for i in range(count)]
    return [Prompt(texts[i], [i, 7], metadata={"source": f"{file}:{i + 1}", "number": i}) for i in range(count)]


def checkpoint(config: Config, step: int, stream: PromptStream | None = None, kept=(), **values) -> Path:
    """Save a step of a run, without its metrics."""
    stream = stream or PromptStream(prompts_of(10), config.seed)
    checkpoints = config.run_path / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    (config.run_path / "config.yaml").write_text(dump(config.model_dump(mode="json")))
    run = SimpleNamespace(path=config.run_path, checkpoint=lambda name: checkpoints / name)
    saver = Saver(config, run, None, SimpleNamespace(line=lambda text: None))
    saver.use({name: Role() for name in config.roles.trained})
    best = BestValidation.of(config).state_dict()
    state = {"data": stream.state_dict(), "num_groups": 0, "best": best, "is_validated": True} | values
    saver.begin(step, hold=lambda role: None)
    saver.commit(LoopState(step, state, list(kept)))
    saver.settle()
    return checkpoints / f"step_{step:06d}"


def find(config: Config, mode: str, allow: bool = False) -> tuple[resume.Resume | None, list[str]]:
    lines: list[str] = []
    return resume.find(config, mode, allow, lines.append), lines


def refusal(config: Config, mode: str, allow: bool = False) -> str:
    with pytest.raises(ConfigError) as error:
        find(config, mode, allow)
    return str(error.value)


def use(config: Config) -> None:
    """As a run that has logged a step."""
    (config.run_path / "metrics.jsonl").write_text('{"step": 1}\n')


# Which one


def test_auto_takes_the_newest_complete_one_and_says_why_others_were_passed_over(tmp_path):
    """O16: a folder that was not finished, one without its marker, one with an empty file."""
    config = config_of(tmp_path)
    folders = {step: checkpoint(config, step) for step in (1, 2, 3, 4)}
    use(config)
    os.truncate(folders[3] / "actor/__0_0.distcp", 0)
    (folders[4] / "manifest.json").unlink()
    shutil.copytree(folders[2], tmp_path / "x/checkpoints/step_000005.partial")
    found, lines = find(config, "auto")
    assert (found.folder, found.step, found.in_place) == (folders[2], 2, True)
    passed = f"megarl: --resume auto: passed over {tmp_path}/x/checkpoints/"
    assert lines == [
        f"{passed}step_000005.partial: was not finished",
        f"{passed}step_000004: no manifest.json",
        f"{passed}step_000003: actor/__0_0.distcp has 0 bytes and had 1000",
        f"megarl: going on from {folders[2]}, after step 2",
    ]
    assert found.role("actor") == str(folders[2] / "actor") and found.has_role("actor") and not found.has_role("critic")


def test_auto_without_any_checkpoint_begins_and_says_so(tmp_path):
    config = config_of(tmp_path)
    line = f"megarl: --resume auto: {tmp_path}/x has no checkpoint: from the beginning"
    assert find(config, "auto") == (None, [line])
    (tmp_path / "x/checkpoints").mkdir(parents=True)
    use(config)  # of a run that ended before its first save
    assert find(config, "auto") == (None, [line])


def test_auto_with_incomplete_ones_only_is_an_error_that_names_them_all(tmp_path):
    config = config_of(tmp_path)
    (checkpoint(config, 1) / "state.json").unlink()
    (tmp_path / "x/checkpoints/step_000002.partial").mkdir()
    reasons = "step_000002.partial: was not finished; step_000001: state.json is missing"
    expected = f"--resume auto: {tmp_path}/x has no complete checkpoint, only incomplete ones ({reasons}); remove them"
    assert refusal(config, "auto").startswith(expected)


def test_a_path_is_a_checkpoint_a_link_to_the_best_or_a_run_directory(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    first, second = checkpoint(config, 1), checkpoint(config, 2)
    use(config)
    (tmp_path / "x/checkpoints/best").symlink_to("step_000001")
    monkeypatch.chdir(tmp_path / "x")
    for path, folder in (
        (first, first),
        (second, second),
        (tmp_path / "x", second),
        (tmp_path / "x/checkpoints/best", first),
        ("checkpoints/best/", first),
        ("checkpoints/step_000001", first),
        (".", second),
    ):
        found, lines = find(config, str(path))
        assert found.folder.resolve() == folder and found.in_place and len(lines) == 1
        assert Path(found.role("actor")).is_absolute()


def test_what_is_no_complete_checkpoint_is_refused_with_the_reason(tmp_path):
    config = config_of(tmp_path)
    folder = checkpoint(config, 1)
    checkpoints = folder.parent
    for name in ("step_000002.partial", "step_000001.removed", "model"):
        shutil.copytree(folder, checkpoints / name)
    (checkpoints / "best").symlink_to("step_000009")
    (checkpoints / "step_000003").mkdir()
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    converted = checkpoints / "model"
    manifest = json.loads((converted / "manifest.json").read_text())
    for name in ("state.json", "config.yaml"):
        (converted / name).unlink()
        del manifest["files"][name]
    (converted / "manifest.json").write_text(json.dumps(manifest))
    for path, message in (
        (tmp_path / "no", "no does not exist; valid: auto, never, a checkpoint or a run directory"),
        (folder / "state.json", "state.json does not exist; valid:"),
        (checkpoints / "best", "best does not exist; valid:"),
        (tmp_path / "empty", "empty has no complete checkpoint"),
        (tmp_path, "is neither a checkpoint nor a run directory"),
        (folder / "actor", "actor is neither a checkpoint nor a run directory"),
        (checkpoints / "step_000003", "step_000003 is not a complete checkpoint: no manifest.json"),
        (checkpoints / "step_000002.partial", "step_000002.partial was not finished, or was being removed"),
        (checkpoints / "step_000001.removed", "step_000001.removed was not finished, or was being removed"),
        (converted, "model has no state.json and config.yaml: it is a model, and not the state of a run"),
    ):
        assert message in refusal(config, str(path)), path
    content = bytearray((folder / "actor/__0_0.distcp").read_bytes())
    content[500] ^= 1
    (folder / "actor/__0_0.distcp").write_bytes(content)
    assert "actor/__0_0.distcp has changed: its SHA-256" in refusal(config, str(folder))


def test_a_checkpoint_of_another_run_goes_on_in_a_fresh_run_directory_only(tmp_path):
    folder = checkpoint(config_of(tmp_path, name="first"), 3)
    config = config_of(tmp_path, name="second")
    found, _ = find(config, str(folder))
    assert found.step == 3 and not found.in_place
    copied = shutil.copytree(folder, tmp_path / "a copy of it")
    assert find(config, str(copied))[0].step == 3
    checkpoint(config, 1)
    use(config)
    assert "second holds an earlier run; go on with it (--resume auto)" in refusal(config, str(folder))
    assert find(config, "auto")[0].folder.parent == tmp_path / "second/checkpoints"


def test_one_that_was_set_aside_does_not_go_on_in_its_run_directory(tmp_path):
    """Later ones of the newer course are there."""
    config = config_of(tmp_path)
    folder = checkpoint(config, 3)
    aside = folder.rename(folder.with_name("step_000003.superseded_1"))
    use(config)
    assert "holds an earlier run" in refusal(config, str(aside))
    assert find(config_of(tmp_path, name="y"), str(aside))[0].step == 3
    assert find(config, "auto")[0] is None


def test_generating_alone_goes_on_from_nothing(tmp_path):
    checkpoint(config_of(tmp_path), 1)
    config = config_of(tmp_path, debug={"generate_only": True})
    assert "debug.generate_only trains nothing that could go on from" in refusal(config, "auto")
    assert find(config_of(tmp_path, name="y", debug={"generate_only": True}), "auto")[0] is None


# With what


def test_a_config_that_trains_otherwise_is_refused_with_all_changes_at_once_unless_it_is_allowed(tmp_path):
    folder = checkpoint(config_of(tmp_path), 2)
    free = {"roles": {"actor": {"nodes": 2}}, "trainer": {"steps": 9}}
    changed = config_of(tmp_path, seed=5, algorithm={"group_size": 3}, **free)
    lines = ["seed: 5, and 1 where it was saved", "algorithm.group_size: 3, and 8 where it was saved"]
    text = f"--resume: {folder} was trained with another config; --allow-config-change goes on with this one:"
    assert refusal(changed, "auto") == "\n  ".join([text, *lines])
    found, said = find(changed, "auto", allow=True)
    assert found.may_change and said[:2] == [f"megarl: changed: {line}" for line in lines]
    found, said = find(config_of(tmp_path, **free), "auto")
    assert not found.may_change and len(said) == 1


def test_a_trained_role_that_was_not_saved_is_a_change_and_the_actor_cannot_be_missing(tmp_path):
    sections = {"algorithm": {"name": "ppo"}, "roles": {"critic": {}}}
    for missing, allowed in (("critic", True), ("actor", False)):
        config = config_of(tmp_path, name=missing, checkpoint={"roles": {missing: False}}, **sections)
        folder = checkpoint(config, 2)
        if allowed:
            change = "checkpoint.roles: the critic was not saved, and would start anew"
            assert refusal(config, "auto").endswith(f"\n  {change}")
            found, said = find(config, "auto", allow=True)
            assert said[0] == f"megarl: changed: {change}"
            assert not found.has_role("critic")
        else:
            expected = f"--resume: {folder} has no actor (checkpoint.roles.actor was false): nothing to go on from"
            assert refusal(config, "auto", allow=True) == expected


def test_a_run_is_done_after_its_last_step_or_an_early_stop_unless_it_owes_a_validation(tmp_path):
    config = config_of(tmp_path, trainer={"steps": 5})
    checkpoint(config, 5)
    found, _ = find(config, "auto")
    assert found.why_done(config) == "all 5 steps are done (trainer.steps)"
    assert found.why_done(config_of(tmp_path, trainer={"steps": 6})) is None
    checkpoint(config, 6, is_validated=False)
    assert find(config, "auto")[0].why_done(config) is None

    worse = {"metric": METRIC, "mode": "max", "value": 0.5, "step": 1, "num_worse": 2}
    stopping, patient = (config_of(tmp_path, name="y", trainer={"early_stop": {"patience": n}}) for n in (2, 3))
    checkpoint(stopping, 3, best=worse)
    found, _ = find(stopping, "auto")
    assert "has not become better in 2 validations (trainer.early_stop)" in found.why_done(stopping)
    assert found.why_done(patient) is None and found.why_done(config_of(tmp_path, name="y")) is None


def test_whether_there_is_a_reference_is_read_from_the_actor(tmp_path):
    config = config_of(tmp_path)
    folder = checkpoint(config, 1)
    assert not resume.Resume(folder, True, False, {}).has_reference()
    (folder / "actor/megarl.json").write_text('{"reference": "float32"}')
    assert resume.Resume(folder, True, False, {}).has_reference()


# The data

PER_STEP, STEPS = 2, 15  # 10 prompts, 3 epochs


def numbers(prompts: list[Prompt]) -> list[int]:
    return [prompt.metadata["number"] for prompt in prompts]


def test_the_prompts_of_each_step_are_those_of_a_run_that_was_not_interrupted(tmp_path):
    """O15: stopped after steps 3, 5 (the end of an epoch) and 7, and twice within one epoch."""
    config = config_of(tmp_path, seed=4)
    stream = PromptStream(prompts_of(10), config.seed)
    whole = {step: numbers(stream.next(PER_STEP)) for step in range(1, STEPS + 1)}
    for first in (1, 6, 11):
        assert sorted(sum((whole[step] for step in range(first, first + 5)), [])) == list(range(10))
    for case, stops in enumerate(([3], [5], [7], [6, 7], [1, 2, 3], [5, 10], [3, 5, 7, 14])):
        config = config_of(tmp_path, name=f"run_{case}", seed=4)
        done, seen = 0, {}
        for stop in (*stops, STEPS):
            stream = PromptStream(prompts_of(10), config.seed)
            if done:
                found, _ = find(config, "auto")
                assert found.step == done
                found.set_place(stream, pytest.fail)
            for step in range(done + 1, stop + 1):
                seen[step] = numbers(stream.next(PER_STEP))
            checkpoint(config, stop, stream)
            done = stop
        assert seen == whole, stops


def test_other_data_are_refused_or_begin_anew_where_a_change_is_allowed(tmp_path):
    config = config_of(tmp_path)
    stream = PromptStream(prompts_of(10), config.seed)
    stream.next(4)
    checkpoint(config, 2, stream)
    other = PromptStream(prompts_of(9), config.seed)
    with pytest.raises(ConfigError, match=r"given rows \[9\], but \[10\] .*; --allow-config-change begins with the"):
        find(config, "auto")[0].set_place(other, pytest.fail)
    lines: list[str] = []
    found, _ = find(config, "auto", allow=True)
    found.set_place(other, lines.append)
    assert len(lines) == 1 and "the data begin anew, and groups kept for later steps are dropped" in lines[0]
    assert other.taken == [0] and found.kept(other, prompts_of(9), pytest.fail) == []


# Groups that dynamic sampling kept

EQUAL, UNEQUAL = (Status.COMPLETED, Status.COMPLETED), (Status.COMPLETED, Status.TRUNCATED)


def collector(config: Config, prompts: list[Prompt]) -> Collector:
    """The statuses of a group follow from its prompt alone."""

    def generate(name, prompts, group_size, tokenizer, seeds):
        samples = []
        for group_id, prompt in enumerate(prompts):
            for status in EQUAL if prompt.metadata["number"] % 3 == 0 else UNEQUAL:
                index = len(samples)
                made = Sample.from_response(prompt, [7, index], group_id=group_id, index=index, status=status)
                made.policy_version = (fleet.version, fleet.version)
                made.rollout_logprobs = -0.1 * made.token_ids.float()
                samples.append(made)
        return samples

    fleet = SimpleNamespace(generate=generate, version=0)
    inputs = SimpleNamespace(stream=PromptStream(prompts, config.seed), tokenizer=None, vocab_size=8, prompts=prompts)
    return Collector(config, inputs, fleet, scorer("completed"))


def next_step(made: Collector, step: int) -> list[tuple]:
    made.fleet.version = step - 1
    samples, _, _ = made.next(step, {})
    return [
        (s.group_id, s.index, s.prompt.metadata["number"], s.reward, s.policy_version, s.rollout_logprobs.tolist())
        for s in samples
    ]


def test_groups_that_were_kept_come_first_after_a_resume_as_without_one(tmp_path):
    algorithm = {"prompts_per_step": 3, "group_size": 2, "reward": "completed"}
    algorithm["dynamic_sampling"] = {"prompts_per_round": 3}
    whole = collector(config_of(tmp_path, algorithm=algorithm), prompts_of(10))
    expected = {step: next_step(whole, step) for step in range(1, 11)}
    num_kept = []
    for stop in range(1, 10):
        config = config_of(tmp_path, name=f"run_{stop}", algorithm=algorithm)
        first = collector(config, prompts_of(10))
        seen = {step: next_step(first, step) for step in range(1, stop + 1)}
        num_kept.append(len(first.kept))
        checkpoint(config, stop, kept=first.kept, **first.state_dict())
        second, (found, _) = collector(config, prompts_of(10)), find(config, "auto")
        found.set_place(second.prompts, pytest.fail)
        second.load_state_dict(found.state, found.kept(second.prompts, second.inputs.prompts, pytest.fail))
        assert seen | {step: next_step(second, step) for step in range(stop + 1, 11)} == expected
    assert max(num_kept) >= 2


def kept_run(tmp_path: Path) -> Config:
    """Has a checkpoint with one kept group, of the prompt t:3."""
    config = config_of(tmp_path)
    samples = [Sample.from_response(prompts_of(10)[2], [8], group_id=5, index=i, reward=1.0) for i in range(2)]
    checkpoint(config, 2, kept=[samples])
    return config


def test_a_template_with_the_days_date_does_not_lose_the_kept_groups(tmp_path):
    config = kept_run(tmp_path)
    prompts = prompts_of(10)
    for prompt in prompts:
        prompt.token_ids = [*prompt.token_ids, 2027]
    found, stream = find(config, "auto")[0], PromptStream(prompts, config.seed)
    found.set_place(stream, pytest.fail)
    kept = found.kept(stream, prompts, pytest.fail)
    assert [sample.prompt.token_ids for sample in kept] == [[2, 7]] * 2  # as it was sampled
    assert prompts[2].token_ids == [2, 7, 2027] and kept[0].prompt.messages == prompts[2].messages


def test_kept_groups_of_the_same_rows_in_another_file_are_dropped_where_a_change_is_allowed(tmp_path):
    config, prompts = kept_run(tmp_path), prompts_of(10, file="moved")
    stream = PromptStream(prompts, config.seed)
    found, _ = find(config, "auto")
    found.set_place(stream, pytest.fail)
    with pytest.raises(RunError, match="kept.jsonl:1: its prompt is from t:3, but .*; --allow-config-change goes on"):
        found.kept(stream, prompts, pytest.fail)
    lines: list[str] = []
    assert find(config, "auto", allow=True)[0].kept(stream, prompts, lines.append) == []
    assert len(lines) == 1 and lines[0].endswith("groups kept for later steps are dropped")
