"""Signals to a process that trains: when they come through, and until when it may save."""

import signal
import time

import pytest
from forked import Child, Say

from megarl import interrupt
from megarl.config_checkpoint import CheckpointConfig
from megarl.errors import RunError
from megarl.interrupt import Interrupts, ignore_warnings

USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT
ALL = ["SIGINT", "SIGTERM", "SIGUSR1"]


@pytest.fixture(autouse=True)
def no_doubles(monkeypatch):
    """However soon after the first one a signal comes, it is a second one."""
    monkeypatch.setattr(interrupt, "SAME_S", 0.0)


def wait_for_signals(say: Say) -> None:
    say("ready")
    while True:
        time.sleep(0.01)


def interruptible(say: Say, work=wait_for_signals, **settings) -> None:
    """`work` under handlers; says what came through, whether a save may follow, and what work can be done then."""
    with Interrupts(CheckpointConfig(**settings)) as interrupts:
        try:
            work(say) if work is wait_for_signals else work(say, interrupts)
        except KeyboardInterrupt as error:
            say(f"{error} {interrupts.received} {interrupts.may_save}")
            if not interrupts.may_save:
                return
            interrupts.waits_for = "the save"
            try:
                wait_for_signals(say)
            except KeyboardInterrupt as error:
                say(f"again {error} {interrupts.may_save}")


@pytest.mark.parametrize(
    "number, save_on, expected",
    [
        (USR1, None, "SIGUSR1 SIGUSR1 True"),
        (TERM, None, "SIGTERM SIGTERM True"),
        (INT, None, "SIGINT SIGINT False"),
        (INT, ALL, "SIGINT SIGINT True"),
        (USR1, [], "SIGUSR1 SIGUSR1 False"),
        (TERM, ["SIGUSR1"], "SIGTERM SIGTERM False"),
    ],
)
def test_a_signal_comes_through_at_once_and_the_config_says_whether_the_run_is_saved(number, save_on, expected):
    settings = {} if save_on is None else {"save_on": save_on}
    with Child(lambda say: interruptible(say, **settings)) as child:
        assert child.line() == "ready"
        child.kill(number)
        assert child.line() == expected


def held(say: Say, interrupts: Interrupts) -> None:
    with interrupts.held("the update"):
        say("held")
        deadline = time.monotonic() + 30
        while interrupts.received is None and time.monotonic() < deadline:
            time.sleep(0.01)
        say(f"goes on after {interrupts.received}")
    say("never")


def test_a_signal_waits_for_the_end_of_what_is_held():
    for number, name in ((TERM, "SIGTERM"), (USR1, "SIGUSR1")):
        with Child(lambda say: interruptible(say, held)) as child:
            assert child.line() == "held"
            child.kill(number)
            assert [child.line(), child.line()] == [f"goes on after {name}", f"{name} {name} True"]


def test_a_signal_that_saves_nothing_waits_for_nothing():
    with Child(lambda say: interruptible(say, held)) as child:
        assert child.line() == "held"
        child.kill(INT)
        assert child.rest() == ["SIGINT SIGINT False"] and child.wait() == 0


def hold_for_ever(say: Say, interrupts: Interrupts) -> None:
    interrupts.hold("step 7")
    say("ready")
    while interrupts.received is None:
        time.sleep(0.01)
    wait_for_signals(say)


def test_the_same_signal_once_more_ends_the_run_at_once_held_or_not():
    with Child(lambda say: interruptible(say, hold_for_ever)) as child:
        for _ in range(2):
            assert child.line() == "ready"
            child.kill(TERM)
        assert child.rest() == ["SIGTERM SIGTERM False"]
    with Child(interruptible) as child:
        assert child.line() == "ready"
        child.kill(USR1)
        assert [child.line(), child.line()] == ["SIGUSR1 SIGUSR1 True", "ready"]
        child.kill(USR1)
        assert child.rest() == ["again SIGUSR1 False"]


@pytest.mark.parametrize("work", [wait_for_signals, hold_for_ever])
def test_a_signal_that_is_delivered_twice_is_one(monkeypatch, work):
    """By srun to all processes of a step, and by the batch script to its child."""
    monkeypatch.setattr(interrupt, "SAME_S", 30.0)
    with Child(lambda say: interruptible(say, work, deadline_s=0.3)) as child:
        assert child.line() == "ready"
        child.kill(USR1)
        if work is wait_for_signals:
            assert child.line() == "SIGUSR1 SIGUSR1 True"
        assert child.line() == "ready"
        for _ in range(3):
            child.kill(USR1)
            time.sleep(0.02)
        what = "the save" if work is wait_for_signals else "step 7"
        late = "SIGUSR1: no checkpoint was complete within 0.3 s (checkpoint.deadline_s), waiting for"
        assert child.rest() == [f"RunError: {late} {what}; the earlier ones are as they were"]


def test_a_save_after_the_warning_goes_on_through_the_end_of_the_time_and_ctrl_c_ends_it():
    """SLURM's SIGTERM follows its SIGUSR1; its SIGKILL comes later yet."""
    with Child(interruptible) as child:
        assert child.line() == "ready"
        child.kill(USR1)
        assert [child.line(), child.line()] == ["SIGUSR1 SIGUSR1 True", "ready"]
        child.kill(TERM)
        time.sleep(0.1)
        child.kill(INT)
        assert child.rest() == ["again SIGINT False"]


def test_the_deadline_counts_from_the_signal_and_names_what_was_waited_for():
    def release_too_late(say, interrupts):
        with interrupts.held("step 7"):
            wait_for_signals(say)

    for work, what in ((release_too_late, "step 7"), (wait_for_signals, "the save")):
        with Child(lambda say: interruptible(say, work, deadline_s=0.1)) as child:
            assert child.line() == "ready"
            child.kill(TERM)
            late = "RunError: SIGTERM: no checkpoint was complete within 0.1 s (checkpoint.deadline_s), waiting for"
            assert child.rest()[-1] == f"{late} {what}; the earlier ones are as they were"
            assert child.wait() == 1


def test_the_deadline_comes_again_where_somebody_took_it_for_a_failure_of_his_own():
    def recover(say, interrupts):
        interrupts.hold("step 7")
        try:
            wait_for_signals(say)
        except RunError:
            say("recovering")
        wait_for_signals(say)

    with Child(lambda say: interruptible(say, recover, deadline_s=0.1)) as child:
        assert child.line() == "ready"
        child.kill(TERM)
        assert child.line() == "recovering" and child.rest()[-1].startswith("RunError: SIGTERM: no checkpoint was")


def test_a_failure_while_held_ends_the_holding():
    interrupts = Interrupts(CheckpointConfig())
    with interrupts:
        with pytest.raises(ValueError), interrupts.held("a save"):
            raise ValueError
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(TERM)


def test_handlers_and_the_deadline_are_gone_afterwards():
    def mine(number, frame):
        pass

    numbers = (INT, TERM, USR1, signal.SIGALRM)
    before = {number: signal.signal(number, mine) for number in numbers}
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts(CheckpointConfig(deadline_s=60.0)):
            assert mine not in [signal.getsignal(number) for number in numbers]
            signal.raise_signal(TERM)
        assert [signal.getsignal(number) for number in numbers] == [mine] * 4
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_ctrl_c_that_a_shell_has_its_background_jobs_ignore_stays_ignored():
    def work(say):
        signal.signal(INT, signal.SIG_IGN)
        ignore_warnings()
        interruptible(say)

    with Child(work) as child:
        assert child.line() == "ready"
        child.kill(INT)
        time.sleep(0.1)
        child.kill(USR1)  # ignored until then, for the processes that the run starts
        assert child.line() == "SIGUSR1 SIGUSR1 True"


def test_before_the_first_step_a_warning_is_no_end():
    def work(say):
        ignore_warnings()
        wait_for_signals(say)

    with Child(work) as child:
        assert child.line() == "ready"
        child.kill(USR1)
        time.sleep(0.1)
        child.kill(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_signals_of_the_config_are_signals():
    assert (
        set(ALL)
        == set(interrupt.NAMES)
        == set(CheckpointConfig.model_json_schema()["properties"]["save_on"]["items"]["enum"])
    )
