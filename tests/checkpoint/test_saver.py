"""Saves: what is on disk when, what a full disk does, and which checkpoints stay."""

import json
import os
import resource
from math import inf, nan
from pathlib import Path

import pytest
from forked import Child, full_disk
from saving import Role, config_of, save, saver_of, state_of

from megarl.checkpoint import folder as folders
from megarl.checkpoint.folder import checkpoints_of, newest_complete, problems
from megarl.checkpoint.saver import best_of
from megarl.errors import RunError
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.sinks import Sinks
from megarl.sample import Prompt, Sample

VALIDATED = {"train": "t", "validation": "v"}


def names(saver) -> list[str]:
    return sorted(os.listdir(saver.run.path / "checkpoints"))


# In which order


def test_a_checkpoint_is_there_when_the_roles_and_the_loop_have_written_all(tmp_path):
    actor, lines = Role(), []
    saver = saver_of(config_of(tmp_path), lines, actor=actor)
    actor.may_write.clear()
    saver.begin(3, hold=lambda role: lines.append(f"held {role.value}"))
    assert saver.is_open and saver.has(3) and not saver.has(2) and names(saver) == ["step_000003.partial"]
    actor.value = 1  # it is trained meanwhile
    saver.poll()  # waits for the loop
    sample = Sample.from_response(Prompt([], [1], metadata={"source": "t:1"}), [2], group_id=0, index=0)
    saver.commit(state_of(3, 0.5, [[sample], [sample]]))
    saver.poll()  # waits for the actor
    assert not saver.is_open and saver.has(3) and saver.published is None and names(saver) == ["step_000003.partial"]
    actor.may_write.set()
    saver.settle()
    saver.poll()
    assert saver.published == 3 and saver.has(3) and names(saver) == ["step_000003"]
    folder = saver.run.checkpoint("step_000003")
    assert lines == ["held 0", f"checkpoint {folder}"] and problems(folder) == []
    assert folders.file_names(folder) == sorted(
        ["actor/__0_0.distcp", "actor/megarl.json", "config.yaml", "kept.jsonl", "manifest.json", "state.json"]
    )
    assert (folder / "actor/__0_0.distcp").read_text().startswith("0 ")
    assert json.loads((folder / "state.json").read_text()) == {"step": 3, "score": 0.5} | state_of(3).values
    assert len((folder / "kept.jsonl").read_text().splitlines()) == 2
    assert (folder / "config.yaml").read_bytes() == (saver.run.path / "config.yaml").read_bytes()


def test_a_save_that_is_not_asynchronous_is_there_after_the_commit(tmp_path):
    saver = saver_of(config_of(tmp_path, checkpoint={"asynchronous": False}), [])
    saver.begin(3, hold=lambda role: None)
    saver.commit(state_of(3))
    assert names(saver) == ["step_000003"]


def test_the_next_save_waits_for_the_last_one_and_what_was_only_begun_is_given_up(tmp_path):
    saver = saver_of(config_of(tmp_path), [])
    saver.begin(1, hold=lambda role: None)
    saver.commit(state_of(1))
    saver.begin(2, hold=lambda role: None)
    assert names(saver) == ["step_000001", "step_000002.partial"]
    saver.begin(3, hold=lambda role: None)
    assert names(saver) == ["step_000001", "step_000003.partial"]
    saver.settle()
    assert names(saver) == ["step_000001"] and not saver.is_open and not saver.has(3)
    assert saver.roles["actor"].calls == ["start", "finish"] * 3


def test_what_a_broken_save_left_is_not_in_the_next_one(tmp_path):
    """O16: the folder is there already, with a file too many."""
    saver = saver_of(config_of(tmp_path), [])
    left = saver.run.checkpoint("step_000003.partial") / "actor"
    left.mkdir(parents=True)
    (left / "__1_0.distcp").write_text("of another layout")
    save(saver, 3)
    assert "actor/__1_0.distcp" not in folders.file_names(saver.run.checkpoint("step_000003"))


def test_only_the_roles_of_the_config_are_saved_and_the_reference_where_it_is_another_than_the_models(tmp_path):
    for switches, sections, expected in (
        ({}, {}, {"actor": "start", "critic": "start"}),
        ({"critic": False}, {}, {"actor": "start"}),
        ({"actor": False}, {}, {"critic": "start"}),
        ({"critic": False}, {"roles": {"reference": {"refresh_every": 5}}}, {"actor": "start with reference"}),
        ({"critic": False}, {"warm_start": {"data": "w"}}, {"actor": "start with reference"}),
    ):
        roles = {"actor": Role(), "critic": Role()}
        config = config_of(tmp_path / str(len(list(tmp_path.iterdir()))), checkpoint={"roles": switches}, **sections)
        saver = saver_of(config, [], **roles)
        save(saver, 1)
        assert {name: role.calls[0] for name, role in roles.items() if role.calls} == expected
        assert {file.parent.name for file in saver.run.checkpoint("step_000001").glob("*/megarl.json")} == {*expected}
    saver = saver_of(config_of(tmp_path / "resumed"), [])
    saver.reference_was_saved = True  # warm_start.data may be null by now
    save(saver, 1)
    assert saver.roles["actor"].calls[0] == "start with reference"


def test_the_templates_text_is_saved_where_the_config_names_one(tmp_path):
    for settings, is_there in (({}, False), ({"chat_template": "chatml"}, True)):
        saver = saver_of(config_of(tmp_path / str(is_there), data={"train": "t"} | settings), [])
        role = saver.roles["actor"]
        role._write = lambda folder, content, write=role._write: ((folder / "hf").mkdir(), write(folder, content))[1]
        save(saver, 1)
        template = saver.run.checkpoint("step_000001") / "actor/hf/chat_template.jinja"
        assert template.exists() == is_there and problems(template.parents[2]) == []
        assert not is_there or template.read_text() == "{{ messages }}"


# Failures


def test_a_failure_names_the_step_the_reason_and_what_there_is(tmp_path):
    saver = saver_of(config_of(tmp_path), [])
    actor, good = saver.roles["actor"], saver.run.checkpoint("step_000001")

    def fail(*arguments):
        raise RunError("actor rank 3: its disk is gone")

    actor.start_save, start_save = fail, actor.start_save
    with pytest.raises(RunError) as error:
        saver.begin(1, hold=lambda role: None)
    assert str(error.value) == "step 1 was not saved: actor rank 3: its disk is gone; there is no earlier checkpoint"
    saver.settle()  # asks nobody again
    assert actor.calls == []
    saver.clear()
    saver.save, actor.start_save = None, start_save
    save(saver, 1)
    actor.finish_save = fail
    with pytest.raises(RunError) as error:
        save(saver, 2)
    saver.settle()
    reason = "actor rank 3: its disk is gone"
    assert str(error.value) == f"step 2 was not saved: {reason}; the last good checkpoint is {good}, untouched"
    saver.clear()
    assert names(saver) == ["step_000001"] and problems(good) == []


def test_the_last_good_checkpoint_is_one_that_is_whole(tmp_path):
    saver = saver_of(config_of(tmp_path), [])
    save(saver, 1)
    save(saver, 2)
    (saver.run.checkpoint("step_000002") / "state.json").unlink()
    saver.roles["actor"].finish_save = lambda: {"no_such_file": {}}
    with pytest.raises(RunError, match="step 3 .* on another node: run_directory must be .*step_000001, untouched"):
        save(saver, 3)


FULL = "No space left on device"


def fill(folder: Path, leave: int) -> None:
    """Take the room of a file system but for some bytes."""
    with open(folder / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - leave)


def save_on_a_full_disk(folder: Path, moment: str, say) -> None:
    """Step 1 is saved, then the disk is filled, and step 2 finds no room."""
    full_disk(str(folder), megabytes=16)
    saver = saver_of(config_of(folder), [], actor=Role(2**21))
    save(saver, 1)
    actor = saver.roles["actor"]
    if moment in ("begin", "role"):
        fill(folder, leave=2**20)
    if moment == "role":  # it says less than it writes, and writes last
        actor.start_save, start = lambda *arguments: start(*arguments) and 1, actor.start_save
        actor.may_write.clear()
    try:
        saver.begin(2, hold=lambda role: None)
        if moment == "commit":
            actor._writing.result()
            fill(folder, leave=0)
        saver.commit(state_of(2))
        actor.may_write.set()
        if moment == "publish":
            actor._writing.result()
            fill(folder, leave=0)
        saver.settle()
    except RunError as error:
        say(error)
    actor.close()
    saver.clear()
    say(names(saver) == ["step_000001"] and problems(saver.run.checkpoint("step_000001")) == [])
    (folder / "filler").unlink()
    saver.save = None
    saver.use({"actor": Role(2**21)})
    save(saver, 2)
    say(newest_complete(saver.run.path)[0].name)


@pytest.mark.parametrize(
    "moment, reason",
    [
        ("begin", "0.0021 GB are to be written, and 0.00105 GB are free"),
        ("role", f"actor rank 0: [Errno 28] {FULL}"),
        ("commit", f"[Errno 28] {FULL}"),
        ("publish", f"[Errno 28] {FULL}"),
    ],
)
def test_on_a_full_disk_the_last_good_checkpoint_stays_and_the_save_says_so(tmp_path, moment, reason):
    with Child(lambda say: save_on_a_full_disk(tmp_path, moment, say)) as child:
        said = child.rest()
    if said[0].startswith(("OSError", "PermissionError")):
        pytest.skip(f"no file system of a small size can be mounted here: {said[0]}")
    good = tmp_path / "x/checkpoints/step_000001"
    assert said == [
        f"step 2 was not saved: {reason}; the last good checkpoint is {good}, untouched", "True", "step_000002"
    ], said  # fmt: skip


def test_a_file_that_may_not_grow_fails_the_save_alike(tmp_path):
    def work(say):
        saver = saver_of(config_of(tmp_path), [], actor=Role(2**21))
        save(saver, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        try:
            save(saver, 2)
        except RunError as error:
            say(error)
        saver.clear()
        say(names(saver) == ["step_000001"] and problems(saver.run.checkpoint("step_000001")) == [])

    with Child(work) as child:
        said = child.rest()
    good = tmp_path / "x/checkpoints/step_000001"
    reason = "actor rank 0: [Errno 27] File too large"
    assert said == [f"step 2 was not saved: {reason}; the last good checkpoint is {good}, untouched", "True"]


def test_room_is_judged_by_what_was_free_before_the_roles_began_to_write(tmp_path):
    """Two roles of which the first has written all before the second one begins."""

    def work(say):
        full_disk(str(tmp_path), megabytes=16)
        saver = saver_of(config_of(tmp_path), [], actor=Role(6 * 2**20), critic=Role(6 * 2**20))
        saver.begin(1, hold=lambda role: saver.roles["actor"].calls and saver.roles["actor"]._writing.result())
        saver.commit(state_of(1))
        saver.settle()
        say(names(saver))

    with Child(work) as child:
        said = child.rest()
    if said[0].startswith(("OSError", "PermissionError")):
        pytest.skip(f"no file system of a small size can be mounted here: {said[0]}")
    assert said == ["['step_000001']"]


def test_a_line_that_cannot_be_written_ends_the_run_with_the_file_and_the_last_good_checkpoint(tmp_path):
    def work(say):
        full_disk(str(tmp_path), megabytes=4)
        config = config_of(tmp_path)
        save(saver_of(config, []), 1)
        sample = Sample.from_response(Prompt([], [1]), [2], group_id=0, index=0, response_text="x" * 2**22)
        fill(tmp_path, leave=0)
        with RunDirectory.__new__(RunDirectory) as run:  # opened while there was room
            run.path, run.config = config.run_path, config
            run.sinks = Sinks(run, say)
            run._metrics = open(run.path / "metrics.jsonl", "a", buffering=1)
            run._samples = open(run.path / "samples.jsonl", "a", buffering=1)
            run._lock = open(run.path / "metrics.jsonl")
            for write in (
                lambda: run.log_metrics({"step": 2, "text": "x" * 9000}),
                lambda: run.log_samples(2, [sample]),
                lambda: run.log_failed(2, [(sample, "no")]),
                lambda: run.dump_batch("step_000002_1", [sample]),
            ):
                try:
                    write()
                except RunError as error:
                    say(error)
        say("closed")
        try:
            RunDirectory(config_of(tmp_path, name="y"), [], "cpu")
        except RunError as error:
            say(error)

    with Child(work) as child:
        said = child.rest()
    if said[0].startswith(("OSError", "PermissionError")):
        pytest.skip(f"no file system of a small size can be mounted here: {said[0]}")
    run = tmp_path / "x"
    end = f"cannot be written: {FULL}; the last good checkpoint is {run}/checkpoints/step_000001, untouched"
    files = ("metrics.jsonl", "samples.jsonl", "failed_rewards.jsonl", "skipped/step_000002_1.pt")
    assert said[:5] == [*(f"{run / name} {end}" for name in files), "closed"], said
    assert said[5:] == [f"{tmp_path}/y cannot be written: {FULL}; there is no earlier checkpoint"]


# Which stay

SCORES = {1: 0.1, 2: 0.9, 3: None, 4: 0.3, 5: 0.9, 6: nan, 7: 0.2}


@pytest.mark.parametrize(
    "checkpoint, trainer, kept, best",
    [
        ({}, {}, [1, 2, 3, 4, 5, 6, 7], None),
        ({"keep_last": 1}, {}, [7], None),
        ({"keep_last": 3}, {}, [5, 6, 7], None),
        ({"keep_last": 1, "keep_every": 3}, {}, [3, 6, 7], None),
        ({"keep_last": 1, "keep_best": 1}, {}, [2, 7], 2),
        ({"keep_last": 2, "keep_best": 3, "keep_every": 5}, {}, [2, 4, 5, 6, 7], 2),
        ({"keep_last": 1, "keep_best": 2, "mode": "min"}, {}, [1, 7], 1),
        ({"keep_last": 1, "keep_best": 9}, {}, [1, 2, 4, 5, 7], 2),
        ({"keep_best": 1}, {}, [1, 2, 3, 4, 5, 6, 7], 2),
        ({"keep_last": 1}, {"early_stop": {}}, [2, 7], 2),
        ({"keep_last": 1, "keep_best": 1, "metric": "validation/length"}, {}, [7], None),
    ],
)
def test_the_last_the_best_and_those_of_every_so_many_steps_stay(tmp_path, checkpoint, trainer, kept, best):
    """Of equal ones the older is the best; a score that is no number is none; nor is one of another metric."""
    config = config_of(tmp_path, data=VALIDATED, checkpoint=checkpoint, trainer={"evaluate_every": 1} | trainer)
    lines: list[str] = []
    saver = saver_of(config, lines)
    for step, score in SCORES.items():
        save(saver, step, score)
        assert (saver.run.checkpoint(f"step_{step:06d}")).is_dir()
    expected = [f"step_{step:06d}" for step in kept]
    if checkpoint.get("keep_best") == 2:  # 7 is the second lowest, and the newest: 4 was it until then
        assert [step for step, score in SCORES.items() if score == 0.2] == [7]
    assert names(saver) == (["best"] if best else []) + expected
    if best:
        assert os.readlink(saver.run.checkpoint("best")) == f"step_{best:06d}"
    assert lines == [f"checkpoint {saver.run.checkpoint(f'step_{step:06d}')}" for step in SCORES]


def test_an_infinite_score_is_a_number(tmp_path):
    config = config_of(tmp_path, data=VALIDATED, checkpoint={"keep_best": 4})
    saver = saver_of(config, [])
    for step, score in enumerate((0.0, inf, -inf, nan), start=1):
        save(saver, step, score)
    best = best_of(config, checkpoints_of(saver.run.path), saver.console)
    assert [folders.step_of(folder) for folder in best] == [2, 1, 3]


def test_a_link_to_the_best_goes_where_there_is_none_any_more(tmp_path):
    saver = saver_of(config_of(tmp_path, data=VALIDATED, checkpoint={"keep_best": 1}), [])
    save(saver, 1, 0.5)
    assert names(saver) == ["best", "step_000001"]
    saver.config = config_of(tmp_path, data=VALIDATED)
    save(saver, 2, 0.5)
    assert names(saver) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"score": 1.0}', None])
def test_a_checkpoint_whose_score_cannot_be_read_is_told_and_ends_nothing(tmp_path, content):
    lines: list[str] = []
    saver = saver_of(config_of(tmp_path, data=VALIDATED, checkpoint={"keep_last": 1, "keep_best": 1}), lines)
    save(saver, 1, 0.9)
    spoilt = saver.run.checkpoint("step_000001")
    (spoilt / "state.json").unlink()
    if content is not None:
        (spoilt / "state.json").write_text(content)
    save(saver, 2, 0.5)
    assert saver.published == 2 and names(saver) == ["best", "step_000002"]
    (told,) = [line for line in lines if line.startswith("warning")]
    assert told.startswith(f"warning: how good {spoilt} is cannot be read from state.json: ")


def test_a_checkpoint_that_cannot_be_removed_is_told_and_ends_nothing(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(1, "Operation not permitted", str(folder))

    lines: list[str] = []
    saver = saver_of(config_of(tmp_path, checkpoint={"keep_last": 1}), lines)
    save(saver, 1)
    with monkeypatch.context() as patch:
        patch.setattr(folders, "remove", refuse)
        save(saver, 2)
    assert saver.published == 2 and names(saver) == ["step_000001", "step_000002"]
    warning = "warning: not all is kept and removed as `checkpoint` in the config says: [Errno 1] Operation not"
    assert lines[-1].startswith(warning)
    save(saver, 3)
    assert names(saver) == ["step_000003"]
