"""The pool: every kind of reward, and every way in which one can fail or hang, in real processes."""

import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from megarl.errors import RunError
from megarl.rewards import pool as pool_module
from megarl.rewards import worker as worker_module
from megarl.rewards.pool import Call, Outcome, RewardPool, latency_metrics
from megarl.sample import Prompt, Sample


def make_samples(number, num_tokens=3):
    prompts = [Prompt([], [1], "18", {"source": f"train.jsonl:{line}"}) for line in range(1, number + 1)]
    fields = {"response_text": "#### 18", "rollout_logprobs": torch.zeros(num_tokens + 1)}
    return [Sample.from_response(p, [2] * num_tokens, group_id=0, index=i, **fields) for i, p in enumerate(prompts)]


def make_pool(*calls, num_workers=2, timeout_s=60.0, batch_timeout_s=60.0, max_concurrent=100, logs=None):
    """Of calls (name, function of odd_rewards, options)."""
    calls = [Call(name, f"odd_rewards:{function}", options) for name, function, options in calls]
    return RewardPool(calls, num_workers, timeout_s, batch_timeout_s, max_concurrent, logs)


def values(outcomes):
    return [outcome.value for outcome in outcomes]


def errors(outcomes):
    return {index: outcome.error for index, outcome in enumerate(outcomes) if outcome.error}


def test_every_kind_of_reward_is_run_on_every_sample_round_after_round():
    names = ("place", "place_async", "place_of_all", "place_of_all_async")
    with make_pool(*((name, name, {}) for name in names), ("doubled", "place", {"factor": 2})) as pool:
        for number in (50, 0, 1, 128):
            outcomes = pool.run(make_samples(number))
            assert {name: errors(column) for name, column in outcomes.items()} == dict.fromkeys([*names, "doubled"], {})
            for name in set(names) - {"place_async"}:
                assert values(outcomes[name]) == [float(i) for i in range(number)]
            assert values(outcomes["doubled"]) == [2.0 * i for i in range(number)]
            assert [outcome.parts["place"] for outcome in outcomes["place_async"]] == list(range(number))
            assert [outcome.parts for outcome in outcomes["place_of_all"]] == [{"number": number}] * number
            if number == 1:
                kept = outcomes["place_async"][0].parts
        last = outcomes["place_async"]
        assert all(outcome.parts["pid"] == kept["pid"] and outcome.parts["loop"] == kept["loop"] for outcome in last)
        assert all(0.05 <= outcome.seconds < 5 for outcome in last)  # of each, not one after the other


NO_REWARDS = [None, float("nan"), float("inf"), "1", [1.0], 1j, {}, {"a": None}, {"a": float("nan")}, {1: 2.0}]
NO_REWARDS += [{"reward": "x"}, Decimal(1), np.ones(1)]
REWARDS = [
    (True, 1.0, {}),
    (0, 0.0, {}),
    (np.float32(0.5), 0.5, {}),
    (Fraction(1, 4), 0.25, {}),
    ({"a": 1, "b": 0.5}, 1.5, {"a": 1.0, "b": 0.5}),
    ({"a": 1, "reward": 5, "b": np.int64(2)}, 5.0, {"a": 1.0, "b": 2.0}),
    ({"reward": 5}, 5.0, {}),
]
FAILING_CALLS = [
    ("raises", "raise_error", {}, "raised ValueError: no such thing: 18"),
    ("half a character", "raise_text", {"text": "\ud800"}, "raised ValueError: \\ud800"),  # which cannot be printed
    ("cancelled", "raise_error_async", {}, "raised CancelledError: by itself"),
    ("huge", "value", {"value": 10**400}, "raised OverflowError: "),
    ("short", "values", {"values": [1.0]}, "returned 1 values for 2 samples"),
    ("number", "values", {"values": 1.0}, "returned 1.0: wanted a list with a value for each sample"),
]


def test_what_is_no_reward_is_an_error_of_the_sample_that_says_where_and_why():
    calls = [(f"wrong {i}", "value", {"value": value}) for i, value in enumerate(NO_REWARDS)]
    calls += [(f"right {i}", "value", {"value": value}) for i, (value, _, _) in enumerate(REWARDS)]
    calls += [(name, function, options) for name, function, options, _ in FAILING_CALLS]
    calls += [("half", "values", {"values": [1.0, None]})]
    with make_pool(*calls) as pool:
        outcomes = pool.run(make_samples(2))
    for i, value in enumerate(NO_REWARDS):
        for line, outcome in enumerate(outcomes[f"wrong {i}"], start=1):
            assert outcome.value is None and outcome.parts == {}
            start = f"reward wrong {i} of a response to train.jsonl:{line} returned {value!r}: wanted a finite number"
            assert outcome.error.startswith(start)
    for i, (_, number, parts) in enumerate(REWARDS):
        for outcome in outcomes[f"right {i}"]:
            assert type(outcome.value) is float and (outcome.value, outcome.parts) == (number, parts)
    for name, _, _, text in FAILING_CALLS:
        for line, outcome in enumerate(outcomes[name], start=1):
            assert outcome.error.startswith(f"reward {name} of a response to train.jsonl:{line} {text}")
    assert outcomes["half"][0].value == 1.0 and "returned None" in outcomes["half"][1].error


def test_a_call_over_its_limit_is_ended_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(pool_module, "LATE_S", 0.5)
    calls = [(f"late {how}", "late", {"how": how}) for how in ("sleep", "compute")]
    names = ("late_async", "blocking_async", "late_of_all", "late_of_all_async", "place")
    calls += [(name, name, {}) for name in names]
    samples = make_samples(20)
    with make_pool(*calls, timeout_s=1.0, batch_timeout_s=1.5, max_concurrent=4) as pool:
        for _ in range(2):  # with new processes
            outcomes = pool.run(samples)
            late = "of a response to train.jsonl:4 took longer than rewards.timeout_s=1"
            for name in ("late sleep", "late compute", "late_async"):
                assert errors(outcomes[name]) == {3: f"reward {name} {late}"}
                assert values(outcomes[name])[4:] == [float(i) for i in range(4, 20)]
                assert 1.0 <= outcomes[name][3].seconds < 10
            blocked = errors(outcomes["blocking_async"])
            assert 3 in blocked and all("blocks its event loop" in text for text in blocked.values())
            for name in ("late_of_all", "late_of_all_async"):
                assert all("rewards.batch_timeout_s=1.5" in errors(outcomes[name])[i] for i in range(20))
            assert values(outcomes["place"]) == [float(i) for i in range(20)]


def test_a_process_that_ends_is_an_error_of_the_sample_that_it_was_at(tmp_path):
    ends = {"exit": "exit code 7", "sys.exit": "exit code 8", "crash": "signal SIGSEGV"}
    calls = [(how, "dying", {"how": how}) for how in ends]
    with make_pool(*calls, ("process", "process", {}), ("raises", "raise_error", {}), logs=tmp_path) as pool:
        outcomes = pool.run(make_samples(20))
    for how, text in ends.items():
        assert list(errors(outcomes[how])) == [3]
        where = f"reward {how} of a response to train.jsonl:4"
        assert outcomes[how][3].error.startswith(f"{where} ended its process ({text}, log {tmp_path}/reward-")
        assert [value for i, value in enumerate(values(outcomes[how])) if i != 3] == [i for i in range(20) if i != 3]

    # what processes are like
    assert errors(outcomes["process"]) == {}
    for outcome in outcomes["process"]:
        assert outcome.parts["threads"] == 1
        assert outcome.parts["group"] == outcome.parts["pid"] != os.getpid()  # out of reach of Ctrl-C
    logs = "".join(path.read_text() for path in tmp_path.glob("reward-*.log"))
    assert logs.count("a reward speaks") == 20 and "in raise_error" in logs


def test_a_round_that_is_given_up_or_interrupted_leaves_nothing_of_it_to_the_next_one():
    samples = make_samples(20)

    def interrupt(num_failed):
        raise KeyboardInterrupt

    with make_pool(("late", "late", {"how": "sleep"}), ("raises", "raise_error", {})) as pool:
        asked = []
        outcomes = pool.run(samples, give_up=lambda num_failed: asked.append(num_failed) or num_failed > 4)
        assert asked[-1] > 4 >= max(asked[:-1], default=0)
        assert outcomes["late"][3].value is None and outcomes["late"][3].error is None
        with pytest.raises(KeyboardInterrupt):
            pool.run(samples, give_up=interrupt)
        outcomes = pool.run(samples[:3])
        assert values(outcomes["late"]) == [0.0, 1.0, 2.0]
        assert list(errors(outcomes["raises"])) == [0, 1, 2]


def test_a_reward_that_cannot_be_loaded_ends_the_run_and_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fleeting_reward.py").write_text("def one(sample):\n    return 1.0\n")
    with RewardPool([Call("gone", "fleeting_reward:one", {})], 1, 60.0, 60.0, 1, None) as pool:
        (tmp_path / "fleeting_reward.py").unlink()
        with pytest.raises(RunError, match="reward gone cannot be loaded.*fleeting_reward"):
            pool.run(make_samples(2))


def run_until_all_are_ready(pool):
    deadline = time.monotonic() + 60
    while not all(worker.is_ready for worker in pool.workers):
        assert values(pool.run(make_samples(3))["place"]) == [0.0, 1.0, 2.0]
        assert time.monotonic() < deadline


def test_a_process_that_died_or_stopped_between_rounds_is_replaced_unless_the_fork_server_is_gone(monkeypatch):
    monkeypatch.setattr(worker_module, "SEND_S", 1)
    with make_pool(("place", "place", {}), num_workers=2) as pool:
        worker = pool.workers[0]
        run_until_all_are_ready(pool)
        os.kill(worker.pid, signal.SIGKILL)
        assert worker.connection.poll(10)
        assert values(pool.run(make_samples(3))["place"]) == [0.0, 1.0, 2.0]
        for number in (3, 1):  # of one sample the other worker has none
            run_until_all_are_ready(pool)
            os.kill(worker.pid, signal.SIGSTOP)
            outcomes = pool.run(make_samples(number, num_tokens=200_000))["place"]  # more than a connection holds
            assert list(errors(outcomes)) == [0] and "did not take its samples" in outcomes[0].error
            assert values(outcomes)[1:] == [1.0, 2.0][: number - 1]
        run_until_all_are_ready(pool)
        pool.server.process.kill()
        assert worker.connection.poll(10)  # it died, too
        with pytest.raises(RunError, match="forks the rewards' workers.*ended: signal SIGKILL"):
            pool.run(make_samples(3))


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_nothing_is_left_of_a_call_over_its_limit_nor_of_a_closed_pool(tmp_path):
    child = ("child", "with_child", {"pid_file": f"{tmp_path}/pid"})
    with make_pool(child, ("place", "place", {}), timeout_s=2.0) as pool:
        assert "took longer" in pool.run(make_samples(1))["child"][0].error
        assert is_gone(int((tmp_path / "pid").read_text()))
        pids = [pool.server.process.pid, *(worker.pid for worker in pool.workers if worker.connection)]
        assert len(pids) > 1 and all(psutil.pid_exists(pid) for pid in pids)
    assert all(is_gone(pid) for pid in pids)


def test_processes_end_with_a_trainer_that_is_killed(tmp_path):
    pid_file = tmp_path / "pid"
    code = (
        "from test_pool import make_pool, make_samples\n"
        f"with make_pool(('child', 'with_child', {{'pid_file': '{pid_file}'}}), num_workers=1) as pool:\n"
        "    pool.run(make_samples(1))\n"
    )
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    deadline = time.monotonic() + 60
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as trainer:
        while not (pid_file.exists() and pid_file.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        processes = psutil.Process(trainer.pid).children(recursive=True)
        assert [process.pid for process in processes][-1:] == [int(pid_file.read_text())] and len(processes) == 3
        trainer.kill()
    for process in processes:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"{process} outlives the trainer"
            time.sleep(0.01)


def test_latencies_are_percentiles_of_the_calls():
    outcomes = [Outcome(1.0, {}, None, float(seconds)) for seconds in range(101)]
    assert latency_metrics(outcomes) == {
        "reward/latency_p50_s": 50.0,
        "reward/latency_p95_s": 95.0,
        "reward/latency_p99_s": 99.0,
    }
    assert latency_metrics([]) == {}
