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
    data = (
        "toy=null",
        "model.path=toy/model",
        "data.train=rows.jsonl",
        "data.validation=null",
        "trainer.evaluate_every=0",
    )
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
                assert (
                    f"going on from runs/{name}/checkpoints/{before.name}, after step {step_of(before)}" in run.output
                )


@pytest.mark.soak
@pytest.mark.parametrize("num_kills", [1, 20])
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


RL = {  # config, its overrides
    "critic and moving reference": ("quickstart_ppo.yaml", ("roles.reference={refresh_every: 2, ema_decay: 0.5}",
        "algorithm.kl_target=0.01", "algorithm.kl_horizon=2000", "algorithm.critic_warmup_steps=1",
        "algorithm.prompts_per_step=16", "roles.critic.gpus_per_node=2", "roles.critic.cpus_per_rank=0.25",
        "roles.actor.cpus_per_rank=0.25", "roles.actor.gpus_per_node=2")),
    "groups kept for later steps": ("quickstart.yaml", ("algorithm.dynamic_sampling={max_rounds: 3}",
        "roles.actor.optimizer.schedule=cosine", "algorithm.prompts_per_step=12", "algorithm.mini_batch_size=48")),
}  # fmt: skip
OTHER_LAYOUT = ("roles.actor.gpus_per_node=2", "roles.actor.tensor_parallel=1", "roles.actor.pipeline_parallel=2")


@pytest.mark.soak
@pytest.mark.parametrize("case", RL)
def test_rl_goes_on_bit_for_bit_and_under_another_layout_to_rounding(tmp_path, case):
    """On the samples that were recorded; across the end of an epoch."""
    config, overrides = RL[case]
    toy.make(str(tmp_path / "toy"), seed=0)
    rows = (tmp_path / "toy/train.jsonl").read_text().splitlines(keepends=True)[:50]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    few = ("toy=null", "model.path=toy/model", "data.train=rows.jsonl", "data.validation=toy/validation.jsonl",
           "warm_start={data: toy/warm_start.jsonl, steps: 60}", "trainer.steps=8", "trainer.save_every=3",
           "trainer.evaluate_every=4", "trainer.evaluate_prompts=16")  # fmt: skip
    command = (str(ROOT / "configs" / config), *few, *overrides)
    with Run(tmp_path, *command, "name=first", "rollout.save=samples") as run:
        assert run.wait(START_S) == 0, run.output
    arguments = ("rollout.replay=samples", "--allow-config-change", "--resume", "runs/first/checkpoints/step_000003")
    for name, layout in (("again", ()), ("other", OTHER_LAYOUT)):
        with Run(tmp_path, *command, f"name={name}", *[o for o in layout if o not in overrides], *arguments) as run:
            assert run.wait(START_S) == 0, run.output
    first, again, other = (untimed(tmp_path / "runs" / name / "metrics.jsonl") for name in ("first", "again", "other"))
    first = first[-len(again) :]
    assert first == again and len(again) == 7  # five steps and two validations
    for metrics, others in zip(first, other, strict=True):
        for key in ("loss/policy", "loss/value", "reward/mean", "kl/ref", "validation/reward_mean"):
            assert others.get(key) == pytest.approx(metrics.get(key), abs=1e-6), (key, metrics["step"])
    last = [tmp_path / "runs" / name / "checkpoints/step_000008" for name in ("first", "again")]
    names = [str(file.relative_to(last[0])) for file in last[0].glob("*/*.distcp")] + ["state.json", "kept.jsonl"]
    assert len(names) > 3
    for name in names:
        assert (last[0] / name).read_bytes() == (last[1] / name).read_bytes(), name
