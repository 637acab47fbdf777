import os
import socket
from types import SimpleNamespace

import pytest

from megarl import machine
from megarl.machine import gpu_memory, interface_of, sees_gpu, why_address_unusable, why_port_unusable


def test_hidden_gpus_are_not_seen(monkeypatch):
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert sees_gpu() is False


def test_a_listening_port_is_in_use_until_it_is_closed():
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = server.getsockname()[1]
        assert why_port_unusable(port) == "is in use"
    assert why_port_unusable(port) is None


def test_ports_outside_the_range_are_refused():
    assert why_port_unusable(0) == why_port_unusable(65536) == "is outside 1..65535"


def test_an_address_of_another_machine_or_no_host_is_unusable():
    assert why_address_unusable("0.0.0.0", 0) is None
    assert why_address_unusable("203.0.113.1", 0) == "cannot be used: Cannot assign requested address"
    assert why_address_unusable("no.such.host.invalid", 0).startswith("cannot be used: ")


class NoGPU(Exception):
    pass


@pytest.fixture
def driver(monkeypatch):
    """pynvml as on a machine with two GPUs: bytes that each process holds of them, None where it does not tell."""
    held = {0: {11: 100, 12: 20, 99: 3}, 1: {}}

    def by_index(number):
        if number not in held:
            raise NoGPU
        return number

    fake = SimpleNamespace(
        NVMLError=NoGPU,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda name: by_index({"GPU-a": 0, "GPU-b": 1}.get(name)),
        nvmlDeviceGetIndex=lambda gpu: gpu,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
            SimpleNamespace(pid=pid, usedGpuMemory=num_bytes) for pid, num_bytes in held[gpu].items()
        ],
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=(1000, 2000)[gpu]),
    )
    monkeypatch.setattr(machine, "pynvml", fake)
    return held


def test_the_memory_of_processes_is_theirs_by_gpu_or_all_that_is_held_where_the_driver_does_not_tell(driver):
    assert gpu_memory(["0"], [11, 12, 13]) == {0: 120}
    assert gpu_memory(["GPU-b", "GPU-a"], [11]) == {1: 2000, 0: 100}  # no process that it knows: all
    assert gpu_memory(["0"], [13]) == {0: 1000}
    driver[0][12] = None
    assert gpu_memory(["0"], [11, 12]) == {0: 1000}


def test_gpus_that_are_not_there_and_processes_that_are_none_hold_nothing(driver):
    assert gpu_memory(["7", "GPU-c", "", "0"], [11]) == {0: 100}
    assert gpu_memory([""], [11]) == gpu_memory([], [11]) == gpu_memory(["0"], []) == {}


def test_without_a_driver_there_is_no_memory_of_gpus(monkeypatch):
    def no_driver():
        raise machine.pynvml.NVMLError(machine.pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(machine.pynvml, "nvmlInit", no_driver)  # as it is where there is none
    assert gpu_memory(["0"], [os.getpid()]) == {}


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("0.0.0.0") is None
