"""Every failure ends within seconds, with one clear sentence, the right exit code, and nothing left behind.

The runs that are killed on the way differ in layout, so that each also shows that weights reach the servers under it.
"""

import os
import signal
import socket

import pytest
from end_to_end import ROOT, Run, steps, wait_until

from megarl.checkpoint.folder import problems, step_of

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
START_S = 300  # for a run to begin its first step on two busy cores
SHORT = ("name=test", "warm_start.steps=100", "data.validation=null", "trainer.steps=10000")
TWO_STAGES = ("roles.actor.tensor_parallel=1", "roles.actor.pipeline_parallel=2")
MORE_PATHS = ("rollout.sampling.temperature=0.7", "algorithm.mini_batch_size=64", "algorithm.kl_coefficient=0.01",
              "algorithm.entropy_coefficient=0.001", "placement=colocated", "checkpoint.save_on=[SIGINT, SIGTERM]",
              "algorithm.name=ppo", "algorithm.epochs=2", "algorithm.kl_in=loss", "algorithm.kl_estimator=k3",
              "roles.critic={gpus_per_node: 2, cpus_per_rank: 0.2}", "rollout.cpus_per_server=0.5",
              "roles.actor.optimizer.schedule=cosine", "roles.actor.optimizer.warmup_steps=2")  # fmt: skip
ENDS_S = 150  # seconds on an idle machine; the imports alone take a minute on a busy one


def assert_one_sentence(run: Run, *parts: str) -> None:
    lines = [line for line in run.output.splitlines() if line.startswith("megarl: error: ")]
    assert len(lines) == 1 and "Traceback" not in run.output, run.output
    for part in parts:
        assert part in run.output, run.output


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.path=nowhere", "model.path"),
        ("roles.actor.tensor_parallel=3", "roles.actor.tensor_parallel"),
        ("rollout.server_args={mem_fraction_statik: 0.8}", "did you mean mem_fraction_static?"),
        ("rollout.temprature=0.7", "did you mean rollout.sampling.temperature?"),
        ("algorithm.prompts_per_step=100000", "4096 prompts after filtering < algorithm.prompts_per_step=100000"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(tmp_path, override, message):
    with Run(tmp_path, QUICKSTART, *SHORT, override) as run:
        assert run.wait(ENDS_S) == 2
        assert_one_sentence(run, message)
        assert not (tmp_path / "runs/test").exists()


def test_an_unreadable_line_is_named_by_file_and_number(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n{"question": \n')
    with Run(tmp_path, QUICKSTART, *SHORT, "data.train=bad.jsonl") as run:
        assert run.wait(ENDS_S) == 2
        assert_one_sentence(run, "bad.jsonl:2")


def test_a_port_in_use_is_refused(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        Run(tmp_path, QUICKSTART, *SHORT, f"rollout.ports=[{taken.getsockname()[1]}]") as run,
    ):
        assert run.wait(ENDS_S) == 2
        assert_one_sentence(run, f"port {taken.getsockname()[1]} is in use")


def test_too_few_cpus_is_an_error_in_seconds_that_names_both_numbers(tmp_path):
    with Run(tmp_path, QUICKSTART, *SHORT, "roles.actor.cpus_per_rank=1000") as run:
        assert run.wait(ENDS_S) == 1
        assert_one_sentence(run, "actor: 2000 CPU", " CPU, 0 GPU")


@pytest.mark.soak
def test_a_server_that_dies_at_start_ends_the_run_with_its_last_words(tmp_path):
    with Run(tmp_path, QUICKSTART, *SHORT, "rollout.server_args={quantization: nonsense}") as run:
        assert run.wait(START_S) == 1
        assert_one_sentence(run, "did not start", "logs/server-0.log", "nonsense")


def assert_servers_follow_the_actor(run: Run) -> None:
    """After the sync of a step the servers' log-probs are those of its weights, which are not the first ones."""
    found = steps(run.folder / "runs/test")
    assert len(found) >= 2 and found[-1]["kl/ref"] > 0
    assert all(m["rollout/logprob_diff_mean"] < 1e-5 for m in found)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_if_told_to_and_ends_everything(tmp_path, number):
    """Also: actor and server in turns, two stages, two updates per step, KL and entropy terms, a falling rate, and agreement
    of log-probs at a temperature other than 1."""
    with Run(tmp_path, QUICKSTART, *SHORT, *TWO_STAGES, *MORE_PATHS) as run:
        run.wait_for_step(tmp_path / "runs/test", 2, START_S)
        assert_servers_follow_the_actor(run)
        run.process.send_signal(number)
        assert run.wait(ENDS_S) == 130
        assert_one_sentence(run, "interrupted")
        (saved,) = (tmp_path / "runs/test/checkpoints").iterdir()
        assert problems(saved) == [] and step_of(saved) >= 2
        assert (saved / "actor/megarl.json").is_file() and (saved / "critic/megarl.json").is_file()


@pytest.mark.soak
def test_a_killed_trainer_leaves_nothing(tmp_path):
    """Also: sequence parallel, and steps in which all rewards are equal leave the weights as they are."""
    cold = [override for override in SHORT if override != "warm_start.steps=100"] + ["warm_start.data=null"]
    with Run(tmp_path, QUICKSTART, *cold, "roles.actor.sequence_parallel=true") as run:
        run.wait_for_step(tmp_path / "runs/test", 2, START_S)
        for metrics in steps(tmp_path / "runs/test"):  # O06: an untrained model earns nothing, so nothing may change
            assert metrics["group/zero_std_ratio"] == 1.0 and metrics["grad_norm"] == 0.0 and metrics["kl/ref"] == 0.0
        assert "no sample has an advantage (are the rewards of every group equal?)" in run.output
        os.kill(run.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not run.descendants(), ENDS_S), run.descendants()


@pytest.mark.soak
def test_a_killed_server_is_started_again_and_the_one_death_too_many_ends_the_run(tmp_path):
    with Run(tmp_path, QUICKSTART, *SHORT, "rollout.tensor_parallel=2", "rollout.max_restarts=1") as run:
        run.wait_for_step(tmp_path / "runs/test", 2, START_S)
        assert_servers_follow_the_actor(run)
        os.kill(schedulers(run)[0], signal.SIGKILL)
        assert wait_until(lambda: any(m["rollout/restarts"] for m in steps(tmp_path / "runs/test")), START_S), (
            run.output
        )
        reached = len(steps(tmp_path / "runs/test"))
        run.wait_for_step(tmp_path / "runs/test", reached + 2, START_S)
        assert_servers_follow_the_actor(run)
        os.kill(schedulers(run)[0], signal.SIGKILL)
        assert run.wait(ENDS_S) == 1
        assert_one_sentence(
            run, "rollout server 0 (http://127.0.0.1:", "after 1 restarts (rollout.max_restarts=1)", "is back"
        )


def schedulers(run: Run) -> list[int]:
    pids = [pid for pid, command in run.descendants().items() if "sglang::scheduler" in command]
    assert len(pids) == 2, run.descendants()
    return pids


@pytest.mark.soak
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    with Run(tmp_path, QUICKSTART, *SHORT, "rollout.servers=2", "rollout.cpus_per_server=0.5") as run:
        run.wait_for_step(tmp_path / "runs/test", 2, START_S)
        assert_servers_follow_the_actor(run)
        ranks = [pid for pid, command in run.descendants().items() if "EngineWorker" in command]
        assert len(ranks) == 2, run.descendants()
        log = str(tmp_path / "runs/test/logs/actor-1.log")
        os.kill(next(pid for pid in ranks if os.readlink(f"/proc/{pid}/fd/1") == log), signal.SIGKILL)
        assert run.wait(ENDS_S) == 1
        assert_one_sentence(run, f"\nactor rank 1 died; log {log}:\n  | ")
