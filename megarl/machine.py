"""What this machine offers, asked without loading torch: GPUs, ports and network interfaces."""

import errno
import os
import socket
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import psutil
import pynvml

if TYPE_CHECKING:
    from megarl.config import Config


def resolve_device(config: "Config") -> Literal["cpu", "cuda"]:
    """`auto` is cuda where this process sees a GPU."""
    if config.device != "auto":
        return config.device
    return "cuda" if sees_gpu() else "cpu"


def sees_gpu() -> bool:
    """Whether torch would find a GPU, asked of the driver: no CUDA context is made."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or none that works
        return False
    try:
        return pynvml.nvmlDeviceGetCount() > 0
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> list[str]:
    """Those of this machine that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]
    if not sees_gpu():
        return []
    pynvml.nvmlInit()
    try:
        return [str(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def why_port_unusable(port: int) -> str | None:
    """Why a server could not listen on the port of this machine right now; None: it could."""
    if not 1 <= port <= 65535:
        return "is outside 1..65535"
    return why_address_unusable("127.0.0.1", port)


def why_address_unusable(host: str, port: int) -> str | None:
    """Why a server could not listen there right now; None: it could. Port 0: any."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
            probe.bind(address)
    except OSError as error:  # socket.gaierror among them
        return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    return None


def gpu_memory(gpus: Iterable[str], pids: Collection[int]) -> dict[int, int]:
    """Bytes that these processes hold of GPUs of this machine, by the GPUs' numbers; {} where there are none.

    `gpus`: as CUDA_VISIBLE_DEVICES names them. Where the driver does not tell by process, or knows none of these (a
    container may have ids of its own), it is what all processes hold of the GPU.
    """
    if not pids:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or none that works
        return {}
    held = {}
    try:
        for name in gpus:
            with suppress(pynvml.NVMLError):  # no GPU of that name
                by_name = pynvml.nvmlDeviceGetHandleByIndex if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID
                gpu = by_name(int(name) if name.isdigit() else name)
                processes = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                own = [process.usedGpuMemory for process in processes if process.pid in pids]
                number, used = pynvml.nvmlDeviceGetIndex(gpu), pynvml.nvmlDeviceGetMemoryInfo(gpu).used
                held[number] = sum(own) if own and None not in own else used
    finally:
        pynvml.nvmlShutdown()
    return held


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None if none of this machine's does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None
