"""How far a run is: its state between two steps, what its validations say, and when it is saved, stopped or done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from megarl.checkpoint import folder as folders
from megarl.checkpoint.best import BestValidation, num_best
from megarl.checkpoint.resume import Resume
from megarl.checkpoint.saver import LoopState, Saver
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.errors import RunError
from megarl.interrupt import Interrupts
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Sample


class Loop:
    """What a trainer gives to be saved; the last three where others use its GPUs in turns."""

    def state(self) -> dict:
        """For JSON: what the next step depends on, besides the roles and the kept groups."""
        raise NotImplementedError

    def kept_groups(self) -> list[list[Sample]]:
        """Of samples that later steps will use."""
        return []

    def hold(self, role: RoleGroup) -> None:
        """All that the role has on its GPUs, whatever else must leave them."""

    def saved_after_push(self, step: int) -> None:
        """Servers that left for a save outside of a step come back."""

    def give_up(self) -> None:
        """After a signal: nothing but saving is to come."""


class Progress:
    def __init__(self, config: Config, run: RunDirectory, tokenizer, console: Console, resume: Resume | None):
        self.config = config
        self.run = run
        self.console = console
        self.resume = resume
        self.saver = Saver(config, run, tokenizer, console)
        self.interrupts = Interrupts(config.checkpoint)
        self.best = BestValidation.of(config)
        self.step = 0  # the last one that was done
        self.owes_validation = True  # of that step
        self._state: LoopState | None = None
        self._is_best = False
        self._lacks_validation = False  # what is published of the last step
        for folder in run.set_aside:
            console.line(f"set aside, as the run goes on from an earlier step: {folder}")
        if resume is not None:
            self.step, self.owes_validation = resume.step, not resume.state["is_validated"]
            self.best.load_state_dict(resume.state["best"])
            self.saver.reference_was_saved = resume.has_reference()
            if resume.in_place:
                self.saver.published, self._lacks_validation = self.step, self.owes_validation

    @contextmanager
    def following(self, loop: Loop, roles: dict[str, RoleGroup]) -> Iterator[None]:
        """Around all steps: signals save the run, and at its end all that was committed is published."""
        self.loop = loop
        self.saver.use(roles)
        self._state = self._state_now()
        with self.interrupts:
            try:
                yield
                with self.interrupts.held("the last save"):
                    self.saver.settle()
            except KeyboardInterrupt:
                if self.interrupts.may_save:
                    self._save_interrupted()
                raise
            except Exception:
                if self.interrupts.may_save:
                    self.interrupts.waits_for = "the last save"
                    self.interrupts.start_deadline()
                    with suppress(RunError):  # those who write may be what failed
                        self.saver.settle()
                raise
        self._tell_best()

    def steps(self) -> Iterator[int]:
        """The numbers of the steps to do."""
        last = self.config.trainer.steps
        while self.step < last:
            if why := self.best.why_stop():
                self.console.line(f"stopped early after step {self.step}: {why}")
                return
            with self.interrupts.held("a save that is written"):
                self.saver.poll()
            yield self.step + 1

    def hold(self) -> None:
        """The weights are about to change: until `reached` there is no state of the run to save."""
        self.interrupts.hold(f"the end of step {self.step + 1}")

    def begin_if_due(self, step: int) -> None:
        """Inside a step, when its weights are there: copy them for a checkpoint that `finish_step` completes."""
        trainer = self.config.trainer
        if trainer.is_due(step, trainer.save_every):
            self.saver.begin(step, self.loop.hold)

    def reached(self, step: int) -> None:
        """The step is done, and its metrics are logged."""
        trainer = self.config.trainer
        self.step, self.owes_validation = step, trainer.is_due(step, trainer.evaluate_every)
        self._is_best, self._lacks_validation = False, False
        self._state = self._state_now()
        self.interrupts.release()

    def validate(self, evaluate: Callable[[int], dict[str, float]]) -> None:
        """Where a validation of the last step is due; then what was begun of a checkpoint is completed."""
        if self.owes_validation:
            self.validated(evaluate(self.step))
        self.finish_step()

    def validated(self, metrics: dict[str, float]) -> None:
        """The validation after the last step; {}: there is none in this run."""
        self.owes_validation, score = False, None
        if metrics:
            if self.best.metric not in metrics:
                names = ", ".join(sorted(name for name in metrics if name.startswith("validation/")))
                raise RunError(f"checkpoint.metric: {self.best.metric} is none of this run's: {names}")
            score = metrics[self.best.metric]
            self._is_best = self.best.see(self.step, score)
        self._state = self._state_now(score)

    def finish_step(self) -> None:
        """Commit what was begun in the step, or save it now where it is the best or the last."""
        is_last = self.step == self.config.trainer.steps or self.best.why_stop()
        is_wanted = is_last or (self._is_best and num_best(self.config) > 0)
        is_there = self.saver.published == self.step and not self._lacks_validation
        with self.interrupts.held(f"the save of step {self.step}"):
            if is_wanted and not self.saver.is_open and not is_there:
                self.saver.begin(self.step, self.loop.hold)
                self.loop.saved_after_push(self.step)
            if self.saver.is_open:
                self.saver.commit(self._state)

    def _state_now(self, score: float | None = None) -> LoopState:
        is_validated = not self.owes_validation
        values = self.loop.state() | {"best": self.best.state_dict(), "is_validated": is_validated}
        return LoopState(self.step, values, list(self.loop.kept_groups()), score)

    def _save_interrupted(self) -> None:
        """The run as it was after the last whole step."""
        received, step = self.interrupts.received, self._state.step
        self.interrupts.waits_for = f"the save of step {step}"
        self.console.line(f"{received}: saving the run after step {step}; the signal once more ends it at once")
        if not self.saver.has(step):
            self.loop.give_up()
            self.saver.begin(step, self.loop.hold)
        if self.saver.is_open:
            self.saver.commit(self._state)
        self.saver.settle()

    def _tell_best(self) -> None:
        link = self.run.path / "checkpoints" / folders.BEST
        if link.exists():
            self.console.line(f"best checkpoint by {self.best.metric}: {link} -> {link.resolve().name}")
