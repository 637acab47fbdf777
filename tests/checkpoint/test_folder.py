"""Folders of checkpoints: which are whole, which is the newest, and what a kill at any moment leaves (O16)."""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import Child

from megarl.checkpoint import folder as folders
from megarl.checkpoint.folder import (
    MANIFEST,
    checkpoints_of,
    newest_complete,
    problems,
    publish,
    remove,
    remove_leftovers,
    role_folder,
    set_aside_newer,
    step_of,
    verify,
)
from megarl.errors import ConfigError

RANK_FILE = "actor/__1_0.distcp"
NAMES = ("actor/__0_0.distcp", RANK_FILE, "actor/megarl.json", "actor/hf/config.json", "state.json", "kept.jsonl")


def make(run_path: Path, step: int, content: str = "", size: int = 64) -> Path:
    """Write a checkpoint and publish it; its files tell which one it is."""
    partial = run_path / "checkpoints" / f"step_{step:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    for name in NAMES:
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_text(f"{name} {step} {content} ".ljust(size, "x"))
    (partial / "kept.jsonl").write_text("")
    return publish(partial, {})


def is_of(folder: Path, step: int, content: str = "") -> bool:
    return all((folder / name).read_text().startswith(f"{name} {step} {content}") for name in NAMES[:-1])


# Whole or not


def test_a_published_checkpoint_is_whole_and_its_manifest_has_every_file(tmp_path):
    folder = make(tmp_path, 10)
    assert folder.name == "step_000010" and problems(folder) == [] and verify(folder) is None
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert sorted(files) == sorted(NAMES) and files["kept.jsonl"]["size"] == 0
    assert files["kept.jsonl"]["sha256"].startswith("e3b0c44298fc1c149afbf4c8996fb924")  # of nothing
    (folder / "notes.txt").write_text("a user's")
    assert problems(folder) == []


def truncate(file: Path) -> None:
    os.truncate(file, 10)


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "truncated": (RANK_FILE, truncate, f"{RANK_FILE} has 10 bytes and had 64"),
    "0 bytes": (RANK_FILE, lambda file: os.truncate(file, 0), f"{RANK_FILE} has 0 bytes and had 64"),
    "missing": (RANK_FILE, Path.unlink, f"{RANK_FILE} is missing"),
    "a folder": (RANK_FILE, lambda file: (file.unlink(), file.mkdir()), f"{RANK_FILE} is missing"),
    "changed": (RANK_FILE, change_a_byte, f"{RANK_FILE} has changed: its SHA-256 is not that of the manifest"),
    "no manifest": (MANIFEST, Path.unlink, "no manifest.json"),
    "empty manifest": (MANIFEST, lambda file: file.write_text(""), "manifest.json is broken: Expecting value"),
    "truncated manifest": (MANIFEST, truncate, "manifest.json is broken: "),
    "zeros": (MANIFEST, lambda file: file.write_bytes(bytes(100)), "manifest.json is broken: "),
    "no text": (MANIFEST, lambda file: file.write_bytes(b"\xff\xfe\xff"), "manifest.json is broken: "),
    "a list": (MANIFEST, lambda file: file.write_text("[]"), "manifest.json is broken: "),
    "a list of files": (MANIFEST, lambda file: file.write_text('{"files": ["a"]}'), "manifest.json is broken: "),
    "no digest": (MANIFEST, lambda file: file.write_text('{"files": {"a": {"size": 1}}}'), "manifest.json is broken: "),
    "no files": (MANIFEST, lambda file: file.write_text('{"files": {}}'), "manifest.json is broken: it lists no file"),
    "no file": (MANIFEST, lambda file: (file.unlink(), file.mkdir()), "manifest.json cannot be read: Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, damage):
    """O16."""
    name, spoil, reason = DAMAGES[damage]
    older, newer = make(tmp_path, 3), make(tmp_path, 4)
    spoil(newer / name)
    newest, passed_over = newest_complete(tmp_path)
    assert newest == older and list(passed_over) == ["step_000004"]
    assert passed_over["step_000004"].startswith(reason), passed_over
    with pytest.raises(ConfigError, match="step_000004 is not a complete checkpoint: ") as error:
        verify(newer)
    assert reason in str(error.value)
    if damage != "changed":
        assert newest_complete(tmp_path, digests=False)[0] == older


def test_all_that_is_wrong_with_a_checkpoint_is_said(tmp_path):
    folder = make(tmp_path, 4)
    for name in ("truncated", "changed"):
        DAMAGES[name][1](folder / ("state.json" if name == "changed" else RANK_FILE))
    (folder / "actor/megarl.json").unlink()
    assert [text.split()[0] for text in problems(folder)] == [RANK_FILE, "actor/megarl.json", "state.json"]


def test_a_file_that_the_disk_does_not_give_is_a_reason_too(tmp_path, monkeypatch):
    folder = make(tmp_path, 4)
    monkeypatch.setattr(folders, "sha256", lambda file: os.read(os.open(folder, os.O_RDONLY), 1))  # EISDIR
    assert problems(folder)[0] == "actor/__0_0.distcp cannot be read: Is a directory"


def test_the_newest_complete_one_is_found_by_its_step_and_what_is_newer_is_told(tmp_path):
    for step in (999_999, 1_000_000, 1_000_001):
        make(tmp_path, step)
    truncate(tmp_path / "checkpoints/step_1000001/state.json")
    for name in ("step_1000002.partial", "step_999998.partial", "step_1000003.removed", "mine.partial", "step_9"):
        (tmp_path / "checkpoints" / name).mkdir()
    newest, passed_over = newest_complete(tmp_path)
    assert newest.name == "step_1000000"
    wrong = "state.json has 10 bytes and had 64"
    assert passed_over == {"step_1000002.partial": "was not finished", "step_1000001": wrong}
    assert [step_of(folder) for folder in checkpoints_of(tmp_path)] == [1_000_001, 1_000_000, 999_999]


def test_where_none_is_complete_all_are_told(tmp_path):
    assert newest_complete(tmp_path) == (None, {}) and checkpoints_of(tmp_path) == []
    make(tmp_path, 1)
    (tmp_path / "checkpoints/step_000001" / MANIFEST).unlink()
    (tmp_path / "checkpoints/step_000000.partial").mkdir()
    expected = {"step_000000.partial": "was not finished", "step_000001": "no manifest.json"}
    assert newest_complete(tmp_path) == (None, expected)


def test_verifying_writes_nothing(tmp_path):
    """Not even to the disk: some file systems that cannot be written refuse a sync."""
    folder = make(tmp_path, 1)
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
        assert problems(folder) == []
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*")}


# Publishing and removing


def test_records_that_are_known_are_not_made_again(tmp_path):
    make(tmp_path, 1)
    partial = tmp_path / "checkpoints/step_000002.partial"
    shutil.copytree(tmp_path / "checkpoints/step_000001", partial)
    known = {RANK_FILE: {"size": 64, "sha256": "0" * 64}}
    folder = publish(partial, known)
    assert problems(folder) == [f"{RANK_FILE} has changed: its SHA-256 is not that of the manifest"]
    assert MANIFEST not in json.loads((folder / MANIFEST).read_text())["files"]


def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """And the next removal begins when its name is."""
    make(tmp_path, 4, "old")
    done: list[str] = []

    def note(file: Path) -> None:
        done.append(str(file.relative_to(tmp_path / "checkpoints")))

    monkeypatch.setattr(os, "fsync", lambda descriptor: note(Path(f"/proc/self/fd/{descriptor}").readlink()))
    for name, function in (("put_in_place", folders.put_in_place), ("remove", folders.remove)):
        wrapped = lambda *paths, name=name, function=function: (done.append(name), function(*paths))[1]  # noqa: E731
        monkeypatch.setattr(folders, name, wrapped)
    make(tmp_path, 4, "new")
    at = done.index("put_in_place")
    parts = ["", "/actor", "/actor/hf", *(f"/{name}" for name in (*NAMES, MANIFEST))]
    assert sorted(done[:at]) == sorted(f"step_000004.partial{part}" for part in parts)
    assert done[at + 1 :] == [".", "remove"]


@pytest.mark.parametrize("flag", [folders.EXCHANGE, 1 << 7])
def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path, monkeypatch, flag):
    """Also where the file system cannot exchange names: the kernel refuses the second flag as NFS does the first."""
    monkeypatch.setattr(folders, "EXCHANGE", flag)
    make(tmp_path, 4, "old")
    (tmp_path / "checkpoints/step_000004/only_in_the_old_one").touch()
    folder = make(tmp_path, 4, "new")
    assert is_of(folder, 4, "new") and problems(folder) == [] and not (folder / "only_in_the_old_one").exists()
    assert os.listdir(tmp_path / "checkpoints") == ["step_000004"]


def test_removing_copes_with_what_an_earlier_removal_left(tmp_path):
    folder = make(tmp_path, 4)
    left = tmp_path / "checkpoints/step_000004.removed/actor"
    left.mkdir(parents=True)
    (left / "file").touch()
    remove(folder)
    remove(folder)  # is gone
    assert os.listdir(tmp_path / "checkpoints") == []


def test_leftovers_are_removed_and_nothing_else(tmp_path):
    make(tmp_path, 4)
    left = ["step_000005.partial", "step_000003.removed", "step_000004.partial.removed"]
    for name in (*left, "step_000006.superseded_1"):
        (tmp_path / "checkpoints" / name / "actor").mkdir(parents=True)
    remove_leftovers(tmp_path / "checkpoints")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_000004", "step_000006.superseded_1"]


def test_later_checkpoints_are_set_aside_each_time_under_another_name(tmp_path):
    for content in ("first", "second"):
        for step in (1, 2, 3):
            make(tmp_path, step, content)
        moved = set_aside_newer(tmp_path, 1)
    assert [folder.name for folder in moved] == ["step_000003.superseded_2", "step_000002.superseded_2"]
    assert newest_complete(tmp_path) == (tmp_path / "checkpoints/step_000001", {})
    assert is_of(tmp_path / "checkpoints/step_000003.superseded_1", 3, "first")


# Kills


def die_at(number: int) -> None:
    """Kill this process as it is about to do its `number`-th operation on files."""
    count = 0

    def hook(event: str, arguments) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "ctypes.dlopen"):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


SOME_OR_ALL = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.soak)])


def killed(run_path: Path, work, every: int) -> Iterator[list[str]]:
    """Do `work(say)` in fresh run directories, killed before each of its operations, or `every` so many; yields what it
    said until then."""
    for number in range(1, 1000, every):
        shutil.rmtree(run_path, ignore_errors=True)
        make(run_path, 1, "old")
        with Child(lambda say: (die_at(number), work(say))) as child:
            said, ended = child.rest(), child.wait()
        assert ended in (0, -signal.SIGKILL), said
        yield said
        if ended == 0:
            assert number > 20
            return


@SOME_OR_ALL
def test_wherever_a_save_and_a_removal_are_killed_the_last_published_one_is_whole(tmp_path, every):
    def work(say):
        remove_leftovers(run_path / "checkpoints")
        make(run_path, 2, "new")
        say("published")
        remove(run_path / "checkpoints/step_000001")
        say("removed")

    run_path = tmp_path / "run"
    for said in killed(run_path, work, every):
        newest, passed_over = newest_complete(run_path)
        assert newest is not None and step_of(newest) in ((2,) if said else (1, 2))
        assert is_of(newest, step_of(newest), "new" if step_of(newest) == 2 else "old")
        assert passed_over in ({}, {"step_000002.partial": "was not finished"})
        remove_leftovers(run_path / "checkpoints")
        assert newest_complete(run_path) == (newest, {})
        assert newest_complete(run_path)[0] == newest and is_of(make(run_path, 3), 3)
        assert newest_complete(run_path)[0].name == "step_000003"


@SOME_OR_ALL
def test_wherever_a_replacement_is_killed_the_old_one_or_the_new_one_is_whole(tmp_path, every):
    def work(say):
        make(run_path, 1, "new")
        say("published")

    run_path = tmp_path / "run"
    for said in killed(run_path, work, every):
        newest, passed_over = newest_complete(run_path)
        assert newest is not None and newest.name == "step_000001" and passed_over == {}
        assert is_of(newest, 1, "new") or (not said and is_of(newest, 1, "old"))
        remove_leftovers(run_path / "checkpoints")
        assert os.listdir(run_path / "checkpoints") == ["step_000001"]


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_at_random_moments_a_run_goes_on_from_the_last_published_one(tmp_path, num_kills):
    """With files of megabytes, of which a kill leaves a part; two checkpoints stay."""
    rng = random.Random(num_kills)

    def work(say):
        remove_leftovers(tmp_path / "checkpoints")
        newest, _ = newest_complete(tmp_path)
        for step in range(step_of(newest) + 1 if newest else 1, 10**6):
            make(tmp_path, step, size=2**20)
            say(step)
            for folder in checkpoints_of(tmp_path)[2:]:
                remove(folder)

    last = 0
    for _ in range(num_kills):
        with Child(work) as child:
            assert child.line() == str(last + 1)
            time.sleep(rng.uniform(0, 0.1))
            child.kill(signal.SIGKILL)
            said = int((child.rest() or [last + 1])[-1])
        newest, _ = newest_complete(tmp_path)
        last = step_of(newest)
        assert said <= last <= said + 1 and is_of(newest, last)  # renamed, and not yet said
        assert [problems(folder) for folder in checkpoints_of(tmp_path)[:2]] == [[]] * min(2, last)


# Role folders


def test_a_role_folder_is_found_from_itself_its_checkpoint_and_its_run(tmp_path):
    make(tmp_path, 3)
    newest = make(tmp_path, 4)
    (tmp_path / "checkpoints/step_000005.partial/actor").mkdir(parents=True)
    (tmp_path / "checkpoints/step_000005.partial/actor/megarl.json").touch()
    (tmp_path / "checkpoints/best").symlink_to("step_000003")
    for path in (newest / "actor", newest, tmp_path, str(tmp_path)):
        assert role_folder(path) == newest / "actor"
    assert role_folder(tmp_path / "checkpoints/best").resolve() == tmp_path / "checkpoints/step_000003/actor"
    truncate(newest / RANK_FILE)
    assert role_folder(tmp_path).parent.name == "step_000003"


def test_where_there_is_no_role_folder_the_reason_is_given(tmp_path):
    run, bare = tmp_path / "run", tmp_path / "bare"
    folder = make(run, 4)
    bare.mkdir()
    for path, role, message in (
        (folder, "critic", f"{folder} has no critic, only actor"),
        (run, "critic", f"{folder} has no critic, only actor"),
        (bare, "actor", "bare is neither a checkpoint nor a run directory with one in checkpoints/"),
        (tmp_path / "no", "actor", "no is neither a checkpoint nor a run directory"),
        (folder / "state.json", "actor", "state.json is neither a checkpoint nor"),
    ):
        with pytest.raises(ConfigError, match=message):
            role_folder(path, role)
    shutil.copytree(folder, run / "checkpoints/step_000005.partial")
    with pytest.raises(ConfigError, match="step_000005.partial is no checkpoint but what is left of one"):
        role_folder(run / "checkpoints/step_000005.partial")
    (folder / RANK_FILE).unlink()
    with pytest.raises(ConfigError) as error:
        role_folder(run)
    reasons = f"step_000005.partial: was not finished; step_000004: {RANK_FILE} is missing"
    assert str(error.value) == f"{run} has no complete checkpoint; {reasons}"
