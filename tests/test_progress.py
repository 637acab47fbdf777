"""When a run is saved, validated, stopped and interrupted, in every order, and that it goes on from there.

The loop of these tests asks and tells in the order of megarl.trainer; its only weight is a number, which each step
changes.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from saving import METRIC, Role, config_of

from megarl.checkpoint import resume
from megarl.checkpoint.folder import newest_complete, problems
from megarl.config import Config
from megarl.config_file import dump
from megarl.data.stream import PromptStream
from megarl.errors import RunError
from megarl.progress import Progress
from megarl.sample import Prompt

VALIDATED = {"train": "t", "validation": "v"}
SCORES = {0: 0.1, 2: 0.3, 4: 0.2, 6: 0.25, 7: 0.4}  # by the step of the validation
PROMPTS = [Prompt([], [i], metadata={"source": f"t:{i}"}) for i in range(5)]
Moment = tuple[int, str]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Trainer:
    def __init__(self, config: Config, at: dict[Moment, Callable[[], None]] | None = None, going_on: bool = False):
        """`at`: what happens at which moment of which step."""
        self.config, self.at = config, at or {}
        self.lines: list[str] = []
        self.events: list[str] = []
        self.scores: dict[int, float] = {}  # of validations in this part of the run
        checkpoints = config.run_path / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        (config.run_path / "config.yaml").write_text(dump(config.model_dump(mode="json")))
        found = resume.find(config, "auto", False, self.lines.append) if going_on else None
        self.run = SimpleNamespace(path=config.run_path, checkpoint=lambda name: checkpoints / name, set_aside=[])
        self.progress = Progress(config, self.run, None, SimpleNamespace(line=self.lines.append), found)
        self.saver = self.progress.saver
        self.role = Role()
        self.stream = PromptStream(PROMPTS, 1)
        if found:
            found.set_place(self.stream, pytest.fail)
            self.role.value = int((found.folder / "actor/__0_0.distcp").read_text().split()[0])

    def happens(self, step: int, moment: str) -> None:
        if (step, moment) in self.at:
            self.at.pop((step, moment))()

    def train(self) -> "Trainer":
        progress = self.progress
        try:
            with progress.following(self, {"actor": self.role}):
                self.validate()
                for step in progress.steps():
                    self.happens(step, "generate")
                    (prompt,) = self.stream.next(1)
                    self.happens(step, "score")
                    progress.hold()
                    self.role.value = self.role.value * 10 + prompt.token_ids[0]
                    self.happens(step, "update")
                    progress.begin_if_due(step)
                    self.happens(step, "push")
                    progress.reached(step)
                    self.happens(step, "reached")
                    self.validate()
        finally:
            self.role.close()
            self.saver.clear()
        return self

    def validate(self) -> None:
        progress = self.progress
        if progress.owes_validation:
            self.happens(progress.step, "validate")
            metrics = {METRIC: SCORES[progress.step]} if self.config.data.validation else {}
            progress.validated(metrics)
            self.scores |= {progress.step: metrics.get(METRIC)}
            self.happens(progress.step, "validated")
        progress.finish_step()
        self.happens(progress.step, "finished")

    # As megarl.progress.Loop

    def state(self) -> dict:
        return {"data": self.stream.state_dict()}

    def kept_groups(self) -> list:
        return []

    def hold(self, role) -> None:
        self.events.append(f"hold {self.progress.step}")

    def saved_after_push(self, step: int) -> None:
        self.events.append(f"push again {step}")

    def give_up(self) -> None:
        self.events.append("give up")


def names(trainer: Trainer) -> list[str]:
    return sorted(os.listdir(trainer.run.path / "checkpoints"))


def saved(folder: Path) -> dict:
    """State of the loop, and of the role."""
    state = json.loads((folder / "state.json").read_text())
    return state | {"value": int((folder / "actor/__0_0.distcp").read_text().split()[0])}


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


def config_with(folder: Path, name: str = "x", steps: int = 7, data=VALIDATED, checkpoint=None, **trainer) -> Config:
    trainer = {"steps": steps, "evaluate_every": 2, "save_every": 3} | trainer
    return config_of(folder, name=name, data=data, trainer=trainer, checkpoint=checkpoint or {})


# Without interruption


def test_what_is_due_is_saved_after_its_validation(tmp_path):
    trainer = Trainer(config_with(tmp_path)).train()
    assert names(trainer) == ["step_000003", "step_000006", "step_000007"] and trainer.scores == SCORES
    folders = [trainer.run.path / "checkpoints" / name for name in names(trainer)]
    assert [saved(folder)["score"] for folder in folders] == [None, 0.25, 0.4]
    assert [saved(folder)["best"]["step"] for folder in folders] == [2, 2, 7]
    assert all(saved(folder)["is_validated"] and problems(folder) == [] for folder in folders)
    assert [str(saved(folder)["value"])[:3] for folder in folders] == [str(saved(folders[0])["value"])] * 3
    assert trainer.lines == [f"checkpoint {folder}" for folder in folders]


def test_the_best_is_saved_when_it_is_not_due_and_named_at_the_end(tmp_path):
    trainer = Trainer(config_with(tmp_path, checkpoint={"keep_best": 1, "keep_last": 1}, save_every=0)).train()
    assert names(trainer) == ["best", "step_000007"]
    # The last is due, and saved in its step.
    assert trainer.events == ["hold 0", "push again 0", "hold 2", "push again 2", "hold 6"]
    link = trainer.run.path / "checkpoints/best"
    assert trainer.lines[-1] == f"best checkpoint by {METRIC}: {link} -> step_000007"


def test_a_run_that_stops_early_keeps_its_best_and_its_last_checkpoint(tmp_path):
    config = config_with(tmp_path, early_stop={"patience": 2}, checkpoint={"keep_last": 1}, save_every=0)
    trainer = Trainer(config).train()
    assert trainer.progress.step == 6 and names(trainer) == ["best", "step_000002", "step_000006"]
    assert os.readlink(trainer.run.path / "checkpoints/best") == "step_000002"
    (stopped,) = [line for line in trainer.lines if line.startswith("stopped early")]
    why = "has not become better in 2 validations (trainer.early_stop): its best is 0.3 at step 2"
    assert stopped == f"stopped early after step 6: {METRIC} {why}"
    found = resume.find(config, "auto", False, lambda line: None)
    assert why in found.why_done(config)
    patient = config_with(tmp_path, early_stop={"patience": 3}, checkpoint={"keep_last": 1}, save_every=0)
    again = Trainer(patient, going_on=True).train()
    assert again.progress.step == 7 and again.scores == {7: 0.4}


def test_a_run_without_validations_owes_none(tmp_path):
    trainer = Trainer(config_with(tmp_path, data={"train": "t"})).train()
    states = [saved(trainer.run.path / "checkpoints" / name) for name in names(trainer)]
    assert [state["is_validated"] for state in states] == [True] * 3 and states[-1]["score"] is None
    assert resume.find(trainer.config, "auto", False, lambda line: None).why_done(trainer.config)


def test_a_metric_that_the_run_does_not_have_ends_it_with_those_that_it_has(tmp_path):
    config = config_with(tmp_path, checkpoint={"metric": "validation/pass_at_8"})
    with pytest.raises(RunError, match=f"checkpoint.metric: validation/pass_at_8 is none of this run's: {METRIC}"):
        Trainer(config).train()


# Interrupted

MOMENTS = ("generate", "score", "update", "push", "reached", "validate", "validated", "finished")


@pytest.mark.parametrize("steps", [(2, 7), pytest.param(range(8), marks=pytest.mark.soak)])
@pytest.mark.parametrize("keeps_best", [False, True])
def test_wherever_a_signal_comes_the_run_is_saved_and_goes_on_from_its_last_whole_step(tmp_path, keeps_best, steps):
    """Weights, prompts, validations and what is the best become those of the run that was not interrupted."""
    checkpoint = {"keep_best": 1, "keep_last": 2} if keeps_best else {}
    whole = Trainer(config_with(tmp_path, "whole", checkpoint=checkpoint)).train()
    expected = saved(newest_complete(whole.run.path)[0])
    for step in steps:
        for moment in MOMENTS:
            config = config_with(tmp_path, f"{step} {moment}", checkpoint=checkpoint)
            first = Trainer(config, at={(step, moment): terminate})
            try:
                first.train()
                assert first.at  # there is no such moment
                continue
            except KeyboardInterrupt:
                assert not first.at
            newest, passed_over = newest_complete(config.run_path)
            before = step - 1 if moment in ("generate", "score") else step
            assert newest is not None and saved(newest)["step"] == before and passed_over == {}, (step, moment)
            has_validated = moment in ("generate", "score", "validated", "finished")
            assert saved(newest)["is_validated"] == (has_validated or before not in SCORES)
            assert not list(config.run_path.glob("checkpoints/*.partial"))
            second = Trainer(config, going_on=True).train()
            last = newest_complete(config.run_path)[0]
            assert saved(last) == expected, (step, moment)
            assert sorted([*first.scores, *second.scores]) == sorted(SCORES), (step, moment)
            assert os.path.lexists(config.run_path / "checkpoints/best") == keeps_best
            shutil.rmtree(config.run_path)


def test_a_resumed_run_whose_owed_validation_is_the_best_saves_it_again_with_its_score(tmp_path):
    config = config_with(tmp_path, checkpoint={"keep_best": 1, "keep_last": 1}, save_every=0)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, at={(2, "validate"): terminate}).train()
    newest = newest_complete(config.run_path)[0]
    assert saved(newest)["score"] is None and os.readlink(newest.with_name("best")) == "step_000000"

    def stop():
        raise RunError("stop")

    with pytest.raises(RunError, match="stop"):
        Trainer(config, at={(3, "generate"): stop}, going_on=True).train()
    assert saved(newest)["score"] == 0.3 and os.readlink(newest.with_name("best")) == "step_000002"
    with pytest.raises(RunError, match="stop"):  # nothing is owed any more
        again = Trainer(config, at={(3, "generate"): stop}, going_on=True)
        again.train()
    assert again.events == [] and again.scores == {}


def test_the_last_validation_is_made_up_for(tmp_path):
    config = config_with(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Trainer(config, at={(7, "validate"): terminate}).train()
    assert resume.find(config, "auto", False, lambda line: None).why_done(config) is None
    assert Trainer(config, going_on=True).train().scores == {7: 0.4}
    assert resume.find(config, "auto", False, lambda line: None).why_done(config)


def test_a_signal_while_an_earlier_save_is_written_completes_both(tmp_path):
    trainer = Trainer(config_with(tmp_path), at={(5, "generate"): terminate})
    trainer.role.may_write.clear()
    trainer.role.has_written = lambda: False
    trainer.give_up = trainer.role.may_write.set
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert names(trainer) == ["step_000003", "step_000004"] and trainer.role.calls == ["start", "finish"] * 2
    assert trainer.lines[0] == "SIGTERM: saving the run after step 4; the signal once more ends it at once"


def test_what_is_being_saved_already_is_not_saved_again(tmp_path):
    for moment, step in (("generate", 4), ("reached", 3), ("push", 3)):
        config = config_with(tmp_path, moment)
        trainer = Trainer(config, at={(step, moment): terminate})
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert names(trainer) == ["step_000003"] and trainer.role.calls == ["start", "finish"]
        assert "give up" not in trainer.events


def test_ctrl_c_saves_nothing_and_leaves_nothing_half(tmp_path):
    for moment in ("generate", "update", "push", "validate"):
        at = {(4, "score"): lambda: trainer.role._writing.result()}  # then it is published before step 5
        at |= {(6, moment): lambda: signal.raise_signal(signal.SIGINT)}
        trainer = Trainer(config_with(tmp_path, moment), at)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert names(trainer) == ["step_000003"]


def test_a_save_that_takes_longer_than_the_deadline_ends_with_the_reason(tmp_path):
    config = config_with(tmp_path, checkpoint={"deadline_s": 0.2})
    trainer = Trainer(config, at={(5, "generate"): lambda: (trainer.role.may_write.clear(), terminate())})
    with pytest.raises(RunError) as error:
        trainer.train()
    why = "SIGTERM: no checkpoint was complete within 0.2 s (checkpoint.deadline_s), waiting for the save of step 4"
    good = f"the last good checkpoint is {config.run_path}/checkpoints/step_000003, untouched"
    assert str(error.value) == f"step 4 was not saved: {why}; the earlier ones are as they were; {good}"
    assert names(trainer) == ["step_000003"]


def test_a_step_that_does_not_end_within_the_deadline_is_named(tmp_path):
    def hang():
        terminate()
        signal.pause()

    config = config_with(tmp_path, checkpoint={"deadline_s": 0.2})
    with pytest.raises(RunError, match="SIGTERM: no checkpoint .*, waiting for the end of step 5; the earlier ones"):
        trainer = Trainer(config, at={(4, "score"): lambda: trainer.role._writing.result(), (5, "update"): hang})
        trainer.train()
    assert newest_complete(config.run_path)[0].name == "step_000003"


# Failures


@pytest.mark.parametrize("failure", [RunError, ValueError, OSError])
def test_whatever_ends_a_run_what_was_committed_is_published_and_what_was_begun_is_not(tmp_path, failure):
    def fail():
        raise failure("broken")

    for moment, step in (("generate", 4), ("push", 6), ("update", 5)):
        trainer = Trainer(config_with(tmp_path, f"{moment}"), at={(step, moment): fail})
        trainer.role.has_written = lambda: False  # so that nothing is published meanwhile
        with pytest.raises(failure, match="broken"):
            trainer.train()
        assert names(trainer) == ["step_000003"]
        shutil.rmtree(trainer.run.path)


def test_a_failure_is_told_though_those_who_write_fail_too_or_never_end(tmp_path):
    def fail(then):
        then()
        raise RunError("a rank died")

    def die():
        trainer.role._writing.cancel()
        trainer.role.finish_save = lambda: (_ for _ in ()).throw(RunError("no answer"))

    for then in (die, lambda: setattr(trainer.role, "finish_save", signal.pause)):
        config = config_with(tmp_path, checkpoint={"deadline_s": 0.2})
        trainer = Trainer(config, at={(4, "generate"): lambda: fail(then)})
        trainer.role.has_written = lambda: False
        with pytest.raises(RunError, match="^a rank died$"):
            trainer.train()
        assert names(trainer) == [] and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_failed_save_ends_the_run_at_the_next_step(tmp_path):
    trainer = Trainer(config_with(tmp_path), at={(3, "finished"): lambda: trainer.role._writing.exception()})
    trainer.role._write = lambda folder, content: (folder / "no/such/folder").touch()
    with pytest.raises(RunError, match=r"step 3 was not saved: .*No such file.*; there is no earlier checkpoint"):
        trainer.train()
    assert trainer.progress.step == 3 and names(trainer) == []
