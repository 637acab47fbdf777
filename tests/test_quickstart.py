"""The quickstart as the README gives it, one seed, with fewer steps."""

import json

import pytest
from end_to_end import ROOT, Run, steps

KEYS = {
    "step", "reward/mean", "reward/std", "kl/ref", "loss/policy", "grad_norm", "entropy", "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max", "response/length_mean", "response/truncated_ratio", "group/zero_std_ratio",
    "reward/errors", "reward/latency_p50_s", "reward/latency_p99_s", "time/generate_s", "time/reward_s", "time/logprob_s", "time/update_s", "time/sync_s", "time/step_s", "perf/tokens_per_s",
}  # fmt: skip
NUM_STEPS = 30


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    with Run(folder, str(ROOT / "configs/quickstart.yaml"), "name=test", f"trainer.steps={NUM_STEPS}") as run:
        assert run.wait(900) == 0, run.output
        yield run


def test_mean_reward_and_held_out_accuracy_rise(run):
    rewards = [m["reward/mean"] for m in steps(run.folder / "runs/test")]
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    lines = [json.loads(line) for line in (run.folder / "runs/test/metrics.jsonl").read_text().splitlines()]
    before, after = [line["validation/reward_mean"] for line in lines if "validation/reward_mean" in line]
    assert after > before + 0.1


def test_run_directory_and_metrics_are_complete(run):
    path = run.folder / "runs/test"
    assert {"config.yaml", "env.json", "metrics.jsonl", "samples.jsonl", "logs", "checkpoints"} <= {p.name for p in path.iterdir()}
    assert {p.name for p in (path / "logs").iterdir()} == {
        *("actor-0.log", "actor-1.log", "server-0.log", "reward.log", "reward-0.log"),
    }
    assert [p.name for p in (path / "checkpoints").iterdir()] == [f"step_{NUM_STEPS:06d}"]
    env = json.loads((path / "env.json").read_text())
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in run.output and f"are in {path.resolve()}" in run.output
    assert env["seed"] == 1 and env["versions"]["sglang"] and "train" in env["command"]
    for number, metrics in enumerate(steps(path), start=1):
        assert KEYS <= metrics.keys() and metrics["step"] == number and metrics["guards/alarms"] == 0
    position = json.loads((path / "checkpoints" / f"step_{NUM_STEPS:06d}" / "data.json").read_text())
    assert position["taken"] == [NUM_STEPS * 16]


def test_trainer_and_server_agree_at_every_step(run):
    for metrics in steps(run.folder / "runs/test"):
        assert metrics["rollout/logprob_diff_mean"] < 1e-5
        assert metrics["rollout/logprob_diff_max"] < 1e-3


def test_samples_are_of_the_policy_that_the_step_trained(run):
    samples = [json.loads(line) for line in (run.folder / "runs/test/samples.jsonl").read_text().splitlines()]
    assert {tuple(s["policy_version"]) for s in samples} == {(step, step) for step in range(NUM_STEPS)}
    assert all(s["policy_version"][0] == s["step"] - 1 for s in samples)


def test_a_used_run_directory_is_refused(run):
    with Run(run.folder, str(ROOT / "configs/quickstart.yaml"), "name=test") as again:
        assert again.wait(60) == 2
        assert "runs/test holds an earlier run" in again.output
