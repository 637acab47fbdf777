"""`megarl train --seeds`: what is refused before anything starts, what each run is given, and what they come to."""

import fcntl
import json
import os
import re
import signal
import statistics
import time
from pathlib import Path

import psutil
import pytest
from end_to_end import ROOT, Run, wait_until
from forked import Child

from megarl import cli, many_seeds
from megarl.config import load
from megarl.many_seeds import Outcome, PassedOn, child_arguments, earlier_walls, spread, write

QUICKSTART, SFT = str(ROOT / "configs/quickstart.yaml"), str(ROOT / "configs/quickstart_sft.yaml")
RUN_S = 600
METRIC = "sft/loss"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(capsys, *arguments: str) -> list[str]:
    """The lines of the error with which the command ends before it has made anything."""
    before = sorted(Path.cwd().rglob("*"))
    assert cli.main(["train", QUICKSTART, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and sorted(Path.cwd().rglob("*")) == before
    return err.removeprefix("megarl: error: ").splitlines()


def test_all_that_is_wrong_is_refused_at_once(folder, capsys):
    wrong = ["--seeds", "1,1,a,-3,", "seed=4", "trainer.stepps=3", "trainer.steps=0", "--resume", "some/folder"]
    lines = refusal(capsys, *wrong)
    assert lines[0] == "8 problems:"
    no_seed = "is no seed; valid: whole numbers from 0 on, as in 1,2,3"
    reasons = ("1 is given twice", f"'a' {no_seed}", f"'-3' {no_seed}", f"'' {no_seed}")
    for line, reason in zip(lines[1:5], reasons, strict=True):
        assert line == f"--seeds 1,1,a,-3,: {reason}"
    assert lines[5] == "override seed=4: --seeds 1,1,a,-3, gives the seeds"
    assert lines[6].startswith("--resume some/folder: with --seeds each run goes on from its own checkpoint; ")
    assert {line.partition(":")[0] for line in lines[7:]} == {"override trainer.stepps=3", "override trainer.steps=0"}


@pytest.mark.parametrize("seeds", ["", ",", "1.5", "1 2", "one"])
def test_what_is_no_list_of_seeds_is_refused(folder, capsys, seeds):
    assert all(line.startswith(("2 problems", f"--seeds {seeds}: ")) for line in refusal(capsys, "--seeds", seeds))


def test_used_run_directories_are_refused_all_at_once(folder, capsys):
    (folder / "runs/x-seed2/checkpoints/step_000004").mkdir(parents=True)
    for seed in (3, 4):
        (folder / f"runs/x-seed{seed}").mkdir()
    (folder / "runs/x-seed3/metrics.jsonl").write_text("{}\n")
    with open(folder / "runs/x-seed4/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = refusal(capsys, "--seeds", "1,2,3,4", "name=x")
        resumed = refusal(capsys, "--seeds", "1,4", "name=x", "--resume", "auto")
    earlier = "name: runs/x-seed{} holds an earlier run; go on with it (--resume auto), "
    assert len(lines) == 4 and [line.startswith(earlier.format(s)) for s, line in zip((2, 3), lines[1:3])] == [True] * 2
    assert lines[3:] == resumed == ["name: runs/x-seed4 is in use by a run that has not ended"]


def test_one_folder_for_the_samples_of_several_runs_is_refused(folder, capsys):
    assert refusal(capsys, "--seeds", "1,2", "rollout.save=samples") == [
        "rollout.save: given samples, but a folder keeps the samples of one run"
    ]


def test_a_dry_run_checks_once_and_names_the_runs(folder, capsys):
    assert cli.main(["train", QUICKSTART, "--seeds", "7,0", "--dry-run", "name=x"]) == 0
    out = capsys.readouterr().out
    assert out.count("# samples per step") == 1
    assert out.splitlines()[-2:] == ["# seed 7    runs/x-seed7", "# seed 0    runs/x-seed0"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "given, expected",
    [
        (["c", "--seeds", "1,2", "a.b=1"], ["c", "a.b=1"]),
        (["--seeds=1,2", "c", "--resume", "auto", "name=y"], ["c", "--resume", "auto"]),
        (["c", "--ray-address", "h:1", "--seeds", "2", "name=y", "--allow-config-change"],
         ["c", "--ray-address", "h:1", "--allow-config-change"]),
    ],
)  # fmt: skip
def test_a_run_is_given_all_but_the_seeds_and_the_name(given, expected):
    arguments = ["train", *given]
    config = load(QUICKSTART, ["seed=2", "name=x-seed2"])
    found = child_arguments(arguments, cli.parse(arguments), config)
    assert found == ["train", *expected, "seed=2", "name=x-seed2"]


def test_mean_and_unbiased_deviation_are_of_the_seeds_that_are_done(folder):
    outcomes = [Outcome(seed, f"runs/x-seed{seed}", "done", last=value) for seed, value in enumerate((0.5, 0.7, 0.9))]
    outcomes.append(Outcome(3, "runs/x-seed3", "failed: exit code 1", wall_s=7.0))
    assert spread(outcomes, "last") == pytest.approx((0.7, 0.2))
    assert spread(outcomes[:1], "last") == (0.5, None)
    assert spread(outcomes, "wall_s") == spread(outcomes, "tokens_per_s") == (None, None)
    file = folder / "runs/x.seeds.json"
    write(file, {"name": "x"}, outcomes)
    assert json.loads(file.read_text())["std"]["last"] == pytest.approx(0.2)
    assert earlier_walls(file) == {0: None, 1: None, 2: None, 3: 7.0}
    assert earlier_walls(folder / "none.json") == {}


@pytest.mark.parametrize("algorithm, metric", [("grpo", "reward/mean"), ("dpo", "dpo/accuracy"), ("sft", "sft/loss")])
def test_the_main_metric_is_the_algorithms(algorithm, metric):
    base = load(QUICKSTART)
    config = base.model_copy(update={"algorithm": base.algorithm.model_copy(update={"name": algorithm})})
    assert many_seeds.metric_of(config) == metric


# The process of a run, with a command that ends at once, or that waits for a config file to be written


@pytest.mark.parametrize(
    "arguments, status", [(["--version"], "done"), (["train", "none.yaml"], "failed: exit code 2")]
)
def test_a_run_is_done_or_failed_as_its_process_ends(folder, arguments, status):
    outcome = Outcome(3, "runs/x-seed3", wall_s=100.0)
    with PassedOn() as signals:
        many_seeds.run(arguments, outcome, signals, is_last=False)
    assert outcome.status == status and outcome.wall_s > 100


@pytest.fixture
def waiting(folder, monkeypatch):
    """A process that is in the middle of a run, and the pid of the run's own process."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    os.mkfifo("config.yaml")

    def in_a_run(say):
        outcome = Outcome(3, "runs/x-seed3", wall_s=0.0)
        try:
            with PassedOn() as signals:
                many_seeds.run(["train", "config.yaml"], outcome, signals, is_last=False)
        finally:
            say(outcome.status)

    def handles_signals() -> bool:
        """As it does once the command line has begun."""
        runs.extend(pid for pid in psutil.Process(child.pid).children() if pid not in runs)
        status = Path(f"/proc/{runs[0].pid}/status").read_text() if runs else ""
        found = re.search(r"SigCgt:\s*(\w+)", status)
        return bool(found and int(found[1], 16) & 1 << signal.SIGTERM - 1)

    runs = []
    with Child(in_a_run) as child:
        assert wait_until(handles_signals, 60)
        yield child, runs[0].pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_to_the_run_and_ends_all(waiting, number):
    child, run = waiting
    child.kill(number)
    assert child.rest() == ["interrupted", f"KeyboardInterrupt: {signal.Signals(number).name}"]
    assert not Path(f"/proc/{run}").exists()


def test_a_warning_before_the_first_step_is_no_end_of_a_run_and_no_other_run_follows(waiting, folder):
    child, run = waiting
    child.kill(signal.SIGUSR1)
    time.sleep(0.2)
    assert Path(f"/proc/{run}").exists()
    (folder / "config.yaml").write_text("none: [")  # and so it ends
    assert child.rest() == ["interrupted", "KeyboardInterrupt: SIGUSR1"]


def test_a_run_ends_with_who_started_it(waiting):
    child, run = waiting
    child.kill(signal.SIGKILL)
    child.wait()
    assert wait_until(lambda: not Path(f"/proc/{run}").exists(), 30)


# Real runs


def seeds_run(folder: Path, *arguments: str) -> Run:
    options = ("name=x", "--seeds", "1,2,3", "algorithm.prompts_per_step=8", "trainer.evaluate_prompts=16")
    options += ("roles.actor.optimizer.schedule=constant", "roles.actor.optimizer.decay_from=0")
    options += ("roles.actor.optimizer.warmup_steps=0",)
    return Run(folder, SFT, *options, "data.validation=runs/toy/warm_start.jsonl", *arguments)


def rows(output: str) -> dict[str, list[str]]:
    """The last table, by the first cell of each row."""
    lines = output[output.rindex("seed  ") :].splitlines()[2:]
    return {line.split()[0]: line.split()[1:] for line in lines if line.strip() and not line.startswith("megarl")}


def metrics(folder: Path, seed: int) -> list[dict]:
    file = folder / f"runs/x-seed{seed}/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.soak
def test_each_seed_is_a_run_and_one_that_fails_stops_no_other(tmp_path):
    (tmp_path / "runs/x-seed2").mkdir(parents=True)
    (tmp_path / "runs/x-seed2/checkpoints").write_text("where a folder should be")
    with seeds_run(tmp_path, "trainer.steps=12") as run:
        assert run.wait(RUN_S) == 1, run.output
    assert "megarl: error: runs/x-seed2 cannot be written" in run.output
    report = json.loads((tmp_path / "runs/x.seeds.json").read_text())
    assert [each["status"] for each in report["seeds"]] == ["done", "failed: exit code 1", "done"]
    losses = []
    for seed, found in ((1, report["seeds"][0]), (3, report["seeds"][2])):
        steps = [line for line in metrics(tmp_path, seed) if METRIC in line]
        assert [line["step"] for line in steps] == list(range(1, 13))
        losses.append(statistics.mean(line[METRIC] for line in steps[-10:]))
        key = f"validation/{METRIC}"
        before, after = (line[key] for line in metrics(tmp_path, seed) if key in line)
        assert [found["last"], found["validation_before"], found["validation_after"]] == [losses[-1], before, after]
    assert losses[0] != losses[1]
    assert report["mean"]["last"] == pytest.approx(statistics.mean(losses))
    table = rows(run.output)
    assert list(table) == ["1", "2", "3", "mean"]
    assert table["1"][0] == f"{losses[0]:.3f}" and table["1"][-1] == "done"
    assert table["2"][:3] == ["-", "-", "-"] and table["2"][-4:] == ["failed:", "exit", "code", "1"]
    assert table["mean"][:3] == [f"{statistics.mean(losses):.3f}", "±", f"{statistics.stdev(losses):.3f}"]
    assert table["mean"][-3:] == ["of", "2", "seeds"]


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_all_and_auto_goes_on_with_what_is_left(tmp_path, number):
    steps = "trainer.steps=400"
    with seeds_run(tmp_path, steps, "trainer.save_every=20") as run:
        # Seed 1 to its end, seed 2 to somewhere.
        assert wait_until(lambda: run.process.poll() is not None or len(metrics(tmp_path, 2)) > 30, RUN_S), run.output
        assert run.process.poll() is None, run.output
        run.process.send_signal(number)
        assert run.wait(60) == (-9 if number == signal.SIGKILL else 130)
        assert wait_until(lambda: not run.descendants(), 60), run.descendants()
    statuses = [each["status"] for each in json.loads((tmp_path / "runs/x.seeds.json").read_text())["seeds"]]
    if number != signal.SIGKILL:
        assert statuses == ["done", "interrupted", "not begun"]
        assert run.output.splitlines()[-1] == "megarl: error: interrupted"
    assert not (tmp_path / "runs/x-seed3").exists()
    done = (tmp_path / "runs/x-seed1/metrics.jsonl").read_text()
    with seeds_run(tmp_path, steps, "trainer.save_every=20", "--resume", "auto") as run:
        assert run.wait(RUN_S) == 0, run.output
    assert "seed 1 (1 of 3): runs/x-seed1: nothing is left to do: all 400 steps are done (trainer.steps)" in run.output
    assert "megarl: going on from runs/x-seed2/checkpoints/step_" in run.output
    assert (tmp_path / "runs/x-seed1/metrics.jsonl").read_text() == done
    for seed in (1, 2, 3):
        assert [line["step"] for line in metrics(tmp_path, seed) if METRIC in line] == list(range(1, 401))
    report = json.loads((tmp_path / "runs/x.seeds.json").read_text())
    assert [each["status"] for each in report["seeds"]] == ["done"] * 3
    walls = [each["wall_s"] for each in report["seeds"]]
    assert (walls[1] is None) == (number == signal.SIGKILL) and None not in (walls[0], walls[2])
