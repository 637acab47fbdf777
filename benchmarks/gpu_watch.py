"""What GPUs and host memory did while something else ran: clocks, power, memory."""

import os
import platform
import statistics
import threading
import time

import psutil
import pynvml
from quickstart import cpu_name

PERIOD_S = 0.25


class Watch(threading.Thread):
    """Use as a context around it. Of the first `num_gpus` that the driver has: Ray hands those out first."""

    def __init__(self, num_gpus: int):
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.gpus = gpu_handles()[:num_gpus]
        self.looks: list[tuple[float, dict[str, float]]] = []  # time.monotonic() -> values, those of GPUs their means

    def __enter__(self) -> "Watch":
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        while not self.ended.wait(PERIOD_S):
            values = {"host_memory_gb": psutil.virtual_memory().used / 1e9, "load": psutil.getloadavg()[0]}
            if self.gpus:
                of_gpus = [look_at(gpu) for gpu in self.gpus]
                values |= {name: statistics.mean(gpu[name] for gpu in of_gpus) for name in of_gpus[0]}
            self.looks.append((time.monotonic(), values))

    def between(self, start: float, end: float) -> dict[str, dict[str, float]]:
        """Median and largest of each value."""
        values = [values for when, values in self.looks if start <= when <= end]
        if not values:
            return {}
        columns = {name: [row[name] for row in values] for name in values[0]}
        return {
            name: {"median": round(statistics.median(column), 1), "max": round(max(column), 1)}
            for name, column in columns.items()
        }


def gpu_handles() -> list:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def look_at(gpu) -> dict[str, float]:
    return {
        "sm_mhz": float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
        "power_w": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "gpu_memory_gb": pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
    }


def describe() -> dict:
    """What machine this is; without loading torch, which would take a part of the GPU."""
    gpus = gpu_handles()
    return {
        "gpus": [pynvml.nvmlDeviceGetName(gpu) for gpu in gpus],
        "driver": pynvml.nvmlSystemGetDriverVersion() if gpus else None,
        "max_sm_mhz": pynvml.nvmlDeviceGetMaxClockInfo(gpus[0], pynvml.NVML_CLOCK_SM) if gpus else None,
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "platform": platform.platform(),
    }
