"""Metrics for Prometheus: an HTTP server in the trainer's process, and what the keys of metrics.jsonl are called there.

Each key has a gauge with the last value that it had: `response/length_mean` is megarl_response_length_mean. Those below
have other names, or are counters.
"""

import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import megarl

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from megarl.monitor.run_directory import RunDirectory
    from megarl.monitor.sinks import Sinks

NAMES = {
    "loss/policy": "policy_loss",
    "loss/value": "value_loss",
    "kl/ref": "kl",
    "time/sync_s": "sync_seconds",
}
TOTALS = {  # key that holds a number of the whole run -> name of the counter
    "step": "steps",
    "warm_start/step": "warm_start_steps",
    "skipped_updates": "skipped_updates",
    "rollout/restarts": "server_restarts",
}
PER_STEP = {  # key that holds a number of one step -> name of the counter of its sum since this start of the run
    "perf/num_tokens": "tokens",
    "guards/alarms": "guard_alarms",
    "reward/errors": "reward_errors",
}


class Prometheus:
    def __init__(self, run: "RunDirectory", sinks: "Sinks"):
        from prometheus_client import CollectorRegistry, start_http_server

        self.sinks = sinks
        self.about = {"version": megarl.__version__, "run": run.config.name, "algorithm": run.config.algorithm.name}
        self._lock = threading.Lock()  # a scrape is in a thread of the server's
        self._gauges: dict[str, tuple[str, float]] = {}  # name -> what it is, value
        self._counters: dict[str, tuple[str, float]] = {}
        self._phases: dict[str, float] = {}
        self._gpu_memory: dict[tuple[str, str, int], int] = {}
        settings, registry = run.config.monitor.prometheus, CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(settings.port, settings.host, registry)
        host, port = self._server.server_address[:2]
        sinks.report(f"metrics for Prometheus: http://{f'[{host}]' if ':' in host else host}:{port}/metrics")

    def log(self, metrics: dict) -> None:
        gpu_memory = self.sinks.gpu_memory()
        with self._lock:
            self._gpu_memory = gpu_memory
            for key, value in metrics.items():
                self._take(key, value)
            if "step" in metrics:
                text = "Unix time of the last line of metrics.jsonl with a step"
                self._gauges["megarl_last_step_timestamp_seconds"] = (text, time.time())

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator["Metric"]:
        """What a scrape gets."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        with self._lock:
            counters, gauges, phases = dict(self._counters), dict(self._gauges), dict(self._phases)
            gpu_memory = self._gpu_memory
        yield InfoMetricFamily("megarl", "the run", self.about)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value)
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        text = "time/PHASE_s, the last one"
        family = GaugeMetricFamily("megarl_phase_seconds", text, labels=["phase"])
        for phase, seconds in phases.items():
            family.add_metric([phase], seconds)
        yield family
        text = "what the role holds of a GPU after the last step; all that is held where the driver does not tell by process"
        family = GaugeMetricFamily("megarl_gpu_memory_bytes", text, labels=["role", "node", "gpu"])
        for (role, node, gpu), held in gpu_memory.items():
            family.add_metric([role, node, str(gpu)], held)
        yield family

    def _take(self, key: str, value: float) -> None:
        if (phase := re.fullmatch("time/(.+)_s", key)) is not None:
            self._phases[phase[1]] = value
        if key in TOTALS:
            self._counters[f"megarl_{TOTALS[key]}_total"] = (f"{key} of the run", value)
        elif key in PER_STEP:
            name = f"megarl_{PER_STEP[key]}_total"
            before = self._counters.get(name, ("", 0))[1]
            self._counters[name] = (f"{key}, summed up since this start of the run", before + value)
        elif key in NAMES or phase is None:
            self._gauges[f"megarl_{NAMES.get(key) or name_of(key)}"] = (f"{key}, the last one", value)


def name_of(key: str) -> str:
    """reward/latency_p50_s: reward_latency_p50_seconds"""
    key = re.sub("(?<!per)_s$", "_seconds", key)
    return re.sub("[^a-zA-Z0-9]+", "_", key).strip("_")
