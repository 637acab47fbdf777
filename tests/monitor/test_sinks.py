"""Where metrics go besides metrics.jsonl, read back with the sinks' own readers, and that none of them stops a run."""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from end_to_end import wait_until
from wandb_files import history, records
from wandb_server import WandbServer

from megarl.config import Config
from megarl.config_checks import check
from megarl.config_monitor import refuse_taken_port
from megarl.errors import ConfigError, RunError
from megarl.monitor import sinks
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.sinks import wandb as wandb_sink


def config_of(folder, **monitor):
    settings = {"name": "x", "run_directory": str(folder), "model": {"path": "m"}, "data": {"train": "t"}}
    warm_start = {"data": "w", "steps": 3}
    return Config.model_validate(settings | {"monitor": monitor, "warm_start": warm_start})


def directory(folder, lines, resumed_step=None, **monitor):
    resume = None if resumed_step is None else SimpleNamespace(step=resumed_step, folder=folder)
    return RunDirectory(config_of(folder, **monitor), [], "cpu", resume, lines.append)


WARM_START = [{"warm_start/step": step, "warm_start/loss": 1.0 / step} for step in (1, 2, 3)]


def steps(first, last, reward):
    return [{"step": step, "reward/mean": reward + step, "time/sync_s": 0.5} for step in range(first, last + 1)]


def log(run, lines):
    for line in lines:
        run.log_metrics(line)


# TensorBoard


def test_tensorboard_has_each_value_at_its_step_and_steps_that_were_done_again_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = []
    with directory(tmp_path, told, tensorboard=True) as run:
        log(run, [*WARM_START, *steps(1, 4, 10.0), {"step": 4, "validation/reward_mean": 0.25}])
    with directory(tmp_path, told, resumed_step=2, tensorboard=True) as run:
        log(run, steps(3, 5, 20.0))

    def scalars(folder, tag):
        reader = EventAccumulator(str(folder))
        reader.Reload()
        return [(event.step, event.value) for event in reader.Scalars(tag)]

    found = scalars(run.path / "tensorboard", "reward/mean")
    assert found == [(1, 11.0), (2, 12.0), (3, 23.0), (4, 24.0), (5, 25.0)]
    losses = scalars(run.path / "tensorboard/warm_start", "warm_start/loss")
    assert losses == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert scalars(run.path / "tensorboard", "validation/reward_mean") == []  # of a step 4 that is no more
    assert told == []


# Weights & Biases


def test_an_offline_run_of_wandb_has_config_values_and_whether_the_run_failed(tmp_path):
    told, options = [], {"mode": "offline", "project": "p", "group": "g", "tags": ["a", "b"]}
    validation = {"step": 4, "validation/reward_mean": 0.25}
    with pytest.raises(RunError), directory(tmp_path, told, wandb=options) as run:
        log(run, [*WARM_START, *steps(1, 4, 10.0), validation])
        raise RunError
    assert told == []
    run_id = (run.path / "wandb_run_id").read_text().strip()
    (file,) = run.path.glob(f"wandb/offline-run-*/run-{run_id}.wandb")
    found = records(file)
    rows = history(found)
    assert [{key: value for key, value in row.items() if key[0] != "_"} for row in rows] == [
        *WARM_START, *steps(1, 4, 10.0), validation
    ]  # fmt: skip
    assert [row["_step"] for row in rows] == [1, 2, 3, 6, 8, 10, 12, 13]  # each line has its own, in each part of a run
    about = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (about.run_id, about.display_name, about.project, about.run_group) == (run_id, "x", "p", "g")
    assert list(about.tags) == ["a", "b"]
    config = {item.key: json.loads(item.value_json) for item in about.config.update}
    assert config["model"]["path"] == "m" and config["env"]["device"] == "cpu" and config["monitor"]["wandb"]["tags"]
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [1]


def test_an_online_run_of_wandb_tells_its_page_and_steps_that_are_done_again_are_not_there_twice(tmp_path, monkeypatch):
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    told, wandb = [], {"project": "p"}
    with directory(tmp_path, told, wandb=wandb) as run:
        log(run, steps(1, 4, 10.0))
    assert [row["step"] for row in server.rows] == [1, 2, 3, 4]
    with directory(tmp_path, told, resumed_step=2, wandb=wandb) as run:
        log(run, steps(3, 4, 10.0))
        assert wait_until(lambda: run.log_metrics({"step": 4}) or told, 60)
        log(run, steps(5, 5, 10.0))
    run_id = (run.path / "wandb_run_id").read_text().strip()
    assert told == [f"the run at Weights & Biases: {server.url}/e/p/runs/{run_id}"]
    rows = [(row["step"], row["reward/mean"]) for row in server.rows]
    assert rows == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 14.0), (5, 15.0)]
    server.shutdown()
    server.server_close()


def test_a_wandb_that_cannot_start_is_told_with_its_cause_and_the_run_goes_on(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    told = []
    with directory(tmp_path, told, wandb={"mode": "online"}) as run:
        assert wait_until(lambda: run.log_metrics({"step": 1}) or told, 60)
        run.log_metrics({"step": 2})
    (line,) = told
    assert line.startswith("warning: monitor.wandb: its process ended with code 1: ") and "No API key" in line
    assert line.endswith(f"(log {run.logs / 'wandb.log'}); the run goes on without it")
    assert json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1]) == {"step": 2}


def test_a_wandb_whose_server_is_silent_holds_up_neither_the_start_nor_for_long_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb_sink, "UPLOAD_S", 0.5)
    told, before = [], children()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        with directory(tmp_path, told, wandb={"mode": "online"}) as run:
            run.log_metrics({"step": 1})
    assert told == [
        "warning: monitor.wandb: not all was sent 0.5 s after the run's end; "
        f"`wandb sync {run.path / 'wandb'}` sends the rest; the run goes on without it"
    ]
    assert not [thread for thread in threading.enumerate() if thread.name == "megarl wandb"]
    assert children() <= before


def children() -> set[str]:
    """Of this process, a thread's too."""
    return {pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


# Prometheus


def scrape(lines) -> dict:
    """What the server whose address is in the run's lines tells: name -> [(labels, value)], and name -> type."""
    from prometheus_client.parser import text_string_to_metric_families

    wait_until(lambda: lines, 60)
    url = lines[0].removeprefix("metrics for Prometheus: ")
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    values: dict = {}
    for sample in (sample for family in families for sample in family.samples):
        values.setdefault(sample.name, []).append((sample.labels, sample.value))
    return values | {"types": {family.name: family.type for family in families}}


def test_prometheus_gets_the_last_values_counters_phases_and_the_memory_of_each_role(tmp_path):
    told, asked = [], []

    def gpu_memory():
        asked.append(threading.current_thread().name)
        return {("actor", "node-1", 0): 5_000_000_000, ("rollout", "node-1", 1): 7}

    line = {"reward/mean": 0.5, "loss/policy": -0.25, "kl/ref": 0.125, "time/sync_s": 1.5, "time/step_s": 4.0}
    line |= {"perf/num_tokens": 100, "perf/tokens_per_s": 25.0, "guards/alarms": 1, "skipped_updates": 2}
    line |= {"reward/latency_p50_s": 0.75, "rollout/restarts": 1}
    with directory(tmp_path, told, prometheus={}) as run:
        with run.sinks.watching(gpu_memory):
            log(run, [*WARM_START, {"step": 7} | line, {"step": 8} | line, {"step": 8, "validation/pass@1": 0.75}])
            assert wait_until(lambda: len(asked) == 6, 30)
        found = scrape(told)
        log(run, [{"step": 9}])
        assert wait_until(lambda: scrape(told)["megarl_steps_total"] == [({}, 9)], 30)
        assert len(asked) == 6 and "megarl_gpu_memory_bytes" not in scrape(told)
    assert set(asked) == {"megarl prometheus"}  # the loop does not wait for the answer
    single = {name: samples[0][1] for name, samples in found.items() if name != "types" and len(samples) == 1}
    assert single.pop("megarl_last_step_timestamp_seconds") <= time.time()
    assert single == {
        "megarl_info": 1, "megarl_steps_total": 8, "megarl_reward_mean": 0.5, "megarl_policy_loss": -0.25,
        "megarl_kl": 0.125, "megarl_sync_seconds": 1.5, "megarl_tokens_total": 200, "megarl_perf_tokens_per_s": 25,
        "megarl_guard_alarms_total": 2, "megarl_skipped_updates_total": 2, "megarl_server_restarts_total": 1,
        "megarl_reward_latency_p50_seconds": 0.75, "megarl_validation_pass_1": 0.75,
        "megarl_warm_start_steps_total": 3, "megarl_warm_start_loss": 1 / 3,
    }  # fmt: skip
    assert found["megarl_info"][0][0].keys() == {"version", "run", "algorithm"}
    assert found["megarl_phase_seconds"] == [({"phase": "sync"}, 1.5), ({"phase": "step"}, 4.0)]
    assert found["megarl_gpu_memory_bytes"] == [
        ({"role": "actor", "node": "node-1", "gpu": "0"}, 5e9), ({"role": "rollout", "node": "node-1", "gpu": "1"}, 7)
    ]  # fmt: skip
    kinds = found["types"]
    assert kinds["megarl_steps"] == kinds["megarl_tokens"] == "counter" and kinds["megarl_reward_mean"] == "gauge"
    with pytest.raises(OSError):
        scrape(told)  # the server ends with the run


def test_a_port_that_is_taken_is_refused_before_the_start_and_later_only_told(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"monitor.prometheus.port: port {port} of 127.0.0.1 .* is in use; "):
            refuse_taken_port(config_of(tmp_path, prometheus={"port": port}))
        told = []
        with directory(tmp_path, told, prometheus={"port": port}) as run:
            log(run, steps(1, 3, 0.0))
    (line,) = told
    assert line.startswith("warning: monitor.prometheus: OSError: ") and "in use" in line
    with pytest.raises(ConfigError, match="a free port of 203.0.113.1 .* cannot be used: Cannot assign requested"):
        refuse_taken_port(config_of(tmp_path, prometheus={"host": "203.0.113.1"}))
    for monitor in ({}, {"prometheus": {}}, {"prometheus": {"port": port}}):
        refuse_taken_port(config_of(tmp_path, **monitor))


def test_a_port_of_a_server_and_names_that_wandb_would_not_take_are_refused():
    monitor = {"prometheus": {"port": 30000}, "wandb": {"project": "a/b", "tags": ["good", "", "x" * 65]}}
    settings = config_of("f", **monitor).model_dump(exclude_unset=True) | {"rollout": {"ports": [30000]}}
    assert [line for line in check(Config.model_validate(settings)) if line.startswith("monitor")] == [
        "monitor.wandb.project: given a/b, allowed: 1 to 128 characters, none of / \\ # ? % :",
        f"monitor.wandb.tags: given ['', {'x' * 65}], allowed: tags of 1 to 64 characters",
        "monitor.prometheus.port: given 30000, which is in rollout.ports too; valid: another one, or 0",
    ]


# What fails


def failing(where):
    """A sink that raises, or for `where` a function that is called, in one of its calls."""

    class Failing:
        def __init__(self, run, sinks):
            self.do("start")

        def log(self, metrics):
            self.do(metrics["step"])

        def close(self, failed):
            self.do("close")

        def do(self, what):
            if what in where:
                where[what]()

    return Failing


def broken():
    raise ValueError("no space\nleft")


@pytest.mark.parametrize("when", ["start", 2, "close"])
def test_a_sink_that_raises_is_told_once_and_left_out(tmp_path, monkeypatch, when):
    monkeypatch.setitem(sinks.SINKS, "tensorboard", failing({when: broken, 3: broken}))
    told = []
    with directory(tmp_path, told, tensorboard=True) as run:
        log(run, steps(1, 2, 0.0))
        if when != "close":
            assert wait_until(lambda: told, 30)
            log(run, steps(3, 4, 0.0))
    assert told == ["warning: monitor.tensorboard: ValueError: no space left; the run goes on without it"]
    assert len((run.path / "metrics.jsonl").read_text().splitlines()) == (2 if when == "close" else 4)


@pytest.mark.parametrize("when", ["start", 1, "close"])
def test_a_sink_that_hangs_does_not_hold_up_the_run_and_is_told(tmp_path, monkeypatch, when):
    release = threading.Event()
    monkeypatch.setitem(sinks.SINKS, "tensorboard", failing({when: release.wait}))
    monkeypatch.setattr(sinks, "CLOSE_S", 0.2)
    told = []
    with directory(tmp_path, told, tensorboard=True) as run:
        log(run, steps(1, 3, 0.0))
    text = "it was not done 0.2 s after the run's end"
    assert told == [f"warning: monitor.tensorboard: {text}; the run goes on without it"]
    release.set()


def test_a_sink_that_falls_behind_is_left_out_before_it_takes_the_memory(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setitem(sinks.SINKS, "tensorboard", failing({1: release.wait}))
    monkeypatch.setattr(sinks, "MAX_WAITING", 3)
    told = []
    with directory(tmp_path, told, tensorboard=True) as run:
        log(run, steps(1, 9, 0.0))
        release.set()
    assert told == ["warning: monitor.tensorboard: it is 3 lines behind; the run goes on without it"]


def test_a_real_writer_that_finds_no_folder_is_told(tmp_path):
    told = []
    (tmp_path / "x").mkdir()
    (tmp_path / "x/tensorboard").write_text("")
    with directory(tmp_path, told, tensorboard=True) as run:
        log(run, steps(1, 2, 0.0))
    (line,) = told
    assert line.startswith("warning: monitor.tensorboard: FileExistsError: ")


def test_sinks_that_are_off_load_nothing():
    code = "import sys, megarl.config, megarl.monitor.sinks, megarl.monitor.sinks.wandb_child\n"
    code += "print(sorted({'tensorboard', 'wandb', 'prometheus_client', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout == "[]\n", done.stderr
