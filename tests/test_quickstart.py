"""The quickstart as the README gives it, one seed, with fewer steps."""

import json
import re
import urllib.request

import pytest
from end_to_end import ROOT, Run, steps, untimed
from wandb_files import history, records

from megarl.checkpoint.folder import checkpoints_of, problems

KEYS = {
    "step", "reward/mean", "reward/std", "kl/ref", "loss/policy", "grad_norm", "entropy", "rollout/logprob_diff_mean",
    "rollout/logprob_diff_max", "response/length_mean", "response/truncated_ratio", "group/zero_std_ratio",
    "reward/errors", "reward/latency_p50_s", "reward/latency_p99_s", "time/generate_s", "time/reward_s", "time/logprob_s", "time/update_s", "time/sync_s", "time/step_s", "perf/tokens_per_s",
}  # fmt: skip
NUM_STEPS = 30
QUICKSTART = str(ROOT / "configs/quickstart.yaml")
OVERRIDES = (
    f"trainer.steps={NUM_STEPS}",
    "trainer.save_every=20",
    "checkpoint.keep_best=1",
    "trainer.evaluate_every=30",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    sinks = "monitor={tensorboard: true, wandb: {mode: offline}, prometheus: {}}"
    with Run(folder, QUICKSTART, *OVERRIDES, "name=test", "rollout.save=samples", sinks) as run:
        run.wait_for_step(folder / "runs/test", 2, 900)
        url = re.search(r"metrics for Prometheus: (\S+)", run.output)[1]
        with urllib.request.urlopen(url, timeout=10) as answer:
            run.scraped = answer.read().decode()
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
    assert {"config.yaml", "env.json", "metrics.jsonl", "samples.jsonl", "logs", "checkpoints"} <= {
        p.name for p in path.iterdir()
    }
    assert {p.name for p in (path / "logs").iterdir()} == {
        *("actor-0.log", "actor-1.log", "server-0.log", "reward.log", "reward-0.log", "wandb.log"),
    }
    names = sorted(p.name for p in (path / "checkpoints").iterdir())
    assert names == ["best", "step_000000", "step_000020", "step_000030"]
    assert (path / "checkpoints/best").resolve().name == "step_000030" and "-> step_000030" in run.output
    assert all(problems(folder) == [] for folder in checkpoints_of(path))
    assert "Freezing GC in Scheduler process" in (path / "logs/server-0.log").read_text()
    env = json.loads((path / "env.json").read_text())
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in run.output and f"are in {path.resolve()}" in run.output
    assert env["seed"] == 1 and env["versions"]["sglang"] and "train" in env["command"]
    for number, metrics in enumerate(steps(path), start=1):
        assert KEYS <= metrics.keys() and metrics["step"] == number and metrics["guards/alarms"] == 0
    state = json.loads((path / "checkpoints" / f"step_{NUM_STEPS:06d}" / "state.json").read_text())
    assert state["step"] == NUM_STEPS and state["data"]["taken"] == [NUM_STEPS * 16]


def test_the_sinks_have_what_metrics_jsonl_has(run):
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = run.folder / "runs/test"
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for folder, axis in (("tensorboard", "step"), ("tensorboard/warm_start", "warm_start/step")):
        reader = EventAccumulator(str(path / folder), {"scalars": 0})
        reader.Reload()
        of_axis = [line for line in lines if axis in line]
        for name in {name for line in of_axis for name in line} - {axis}:
            expected = [(line[axis], pytest.approx(line[name])) for line in of_axis if name in line]
            assert [(event.step, event.value) for event in reader.Scalars(name)] == expected, name
    families = text_string_to_metric_families(run.scraped)
    scraped = {sample.name: sample.value for family in families for sample in family.samples}
    step = steps(path)[int(scraped["megarl_steps_total"]) - 1]
    keys = {"reward_mean": "reward/mean", "policy_loss": "loss/policy", "kl": "kl/ref", "sync_seconds": "time/sync_s"}
    assert all(scraped[f"megarl_{name}"] == step[key] for name, key in keys.items())
    assert scraped["megarl_tokens_total"] == sum(line["perf/num_tokens"] for line in steps(path)[: step["step"]])
    assert "warning: monitor" not in run.output
    (offline,) = path.glob("wandb/offline-run-*/run-*.wandb")
    found = records(offline)
    rows = history(found)
    assert [{key: value for key, value in row.items() if key[0] != "_"} for row in rows] == lines
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [0]


def test_trainer_and_server_agree_at_every_step(run):
    for metrics in steps(run.folder / "runs/test"):
        assert metrics["rollout/logprob_diff_mean"] < 1e-5
        assert metrics["rollout/logprob_diff_max"] < 1e-3


def test_samples_are_of_the_policy_that_the_step_trained(run):
    samples = [json.loads(line) for line in (run.folder / "runs/test/samples.jsonl").read_text().splitlines()]
    assert {tuple(s["policy_version"]) for s in samples} == {(step, step) for step in range(NUM_STEPS)}
    assert all(s["policy_version"][0] == s["step"] - 1 for s in samples)


def test_a_used_run_directory_is_refused(run):
    with Run(run.folder, QUICKSTART, "name=test") as again:
        assert again.wait(60) == 2
        assert "runs/test holds an earlier run; go on with it (--resume auto)" in again.output


def test_training_again_on_its_samples_from_a_checkpoint_gives_the_rest_of_the_run_bit_for_bit(run):
    """Without servers: metrics, optimizer, weights and the state of the loop."""
    checkpoint, changed = "runs/test/checkpoints/step_000020", ("rollout.replay=samples", "trainer.steps=31")
    with Run(run.folder, QUICKSTART, *OVERRIDES[1:], "name=again", *changed, "--resume", checkpoint) as refused:
        assert refused.wait(60) == 2
        assert "rollout.replay: samples, and null where it was saved" in refused.output, refused.output
        assert "trainer.steps" not in refused.output  # no rate depends on it
    arguments = ("name=again", "rollout.replay=samples", "--resume", checkpoint, "--allow-config-change")
    with Run(run.folder, QUICKSTART, *OVERRIDES, *arguments) as again:
        assert again.wait(300) == 0, again.output
        assert f"going on from {checkpoint}, after step 20" in again.output
    first, second = (untimed(run.folder / "runs" / name / "metrics.jsonl") for name in ("test", "again"))
    assert len(second) == 11 and second == first[-11:]  # of ten steps and a validation
    saved = [run.folder / "runs" / name / "checkpoints/step_000030" for name in ("test", "again")]
    for name in ("actor/__0_0.distcp", "actor/__1_0.distcp", "state.json"):
        assert (saved[0] / name).read_bytes() == (saved[1] / name).read_bytes(), name
