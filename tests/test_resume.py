"""Runs that are killed and go on are the uninterrupted run, bit for bit."""

import json
import random
import time
from pathlib import Path

import pytest
from end_to_end import ROOT, Run, untimed, wait_until

from megarl.checkpoint.folder import newest_complete, step_of
from megarl.data import toy

SFT = str(ROOT / "configs/quickstart_sft.yaml")
START_S = 300
NUM_ROWS = 100  # of which a step takes 16: an epoch ends inside of steps 7, 13, 19 ...


def write_rows(folder: Path) -> tuple[str, ...]:
    """Overrides for a supervised run of few rows that saves after every step."""
    toy.make(str(folder / "toy"), seed=0)
    rows = (folder / "toy/warm_start.jsonl").read_text().splitlines(keepends=True)[:NUM_ROWS]
    (folder / "rows.jsonl").write_text("".join(rows))
    data = ("toy=null", "model.path=toy/model", "data.train=rows.jsonl", "data.validation=null", "trainer.evaluate_every=0")
    sizes = ("algorithm.prompts_per_step=16", "roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=1")
    return (*data, *sizes, "roles.actor.optimizer.warmup_steps=5")


def train_with_kills(folder: Path, overrides: tuple[str, ...], name: str, num_kills: int, seed: int) -> None:
    """Kill all processes at random moments after the first save, and resume, until the run ends by itself."""
    rng = random.Random(seed)
    path = folder / "runs" / name
    for kill in range(num_kills + 1):
        before = newest_complete(path)[0]
        resume = ("--resume", "auto") if kill else ()
        with Run(folder, SFT, *overrides, f"name={name}", *resume) as run:
            if kill == num_kills:
                assert run.wait(START_S) == 0, run.output
                return
            saved = lambda: (newest := newest_complete(path, digests=False)[0]) and newest != before  # noqa: E731
            assert wait_until(lambda: saved() or run.process.poll() is not None, START_S), run.output
            assert run.process.poll() is None, run.output
            time.sleep(rng.uniform(0, 0.5))
            run.kill_all()
            if kill:
                assert f"going on from {before}, after step {step_of(before)}" in run.output


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.soak)])
def test_a_run_that_was_killed_during_its_saves_ends_as_one_that_was_not(tmp_path, num_kills):
    """Across ends of epochs (O15), with half-written checkpoints (O16)."""
    num_steps = 20 + 20 * num_kills
    overrides = (*write_rows(tmp_path), f"trainer.steps={num_steps}")
    with Run(tmp_path, SFT, *overrides, "name=whole") as run:
        assert run.wait(START_S) == 0, run.output
    train_with_kills(tmp_path, (*overrides, "trainer.save_every=1"), "killed", num_kills, seed=num_kills)
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert untimed(whole / "metrics.jsonl") == untimed(killed / "metrics.jsonl")
    last = [newest_complete(path)[0] for path in (whole, killed)]
    assert step_of(last[0]) == step_of(last[1]) == num_steps
    for name in ("actor/__0_0.distcp", "actor/__1_0.distcp", "state.json"):
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
    starts = json.loads((killed / "env.json").read_text())
    assert len(starts["earlier"]) == num_kills
