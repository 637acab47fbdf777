"""What this machine offers, asked without loading torch: GPUs, ports and network interfaces."""

import errno
import os
import socket
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


def why_port_unusable(port: int) -> str | None:
    """Why a server could not listen on the port of this machine right now; None: it could."""
    if not 1 <= port <= 65535:
        return "is outside 1..65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this IP address; None if none of this machine's does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address == address for found in addresses):
            return name
    return None
