"""What `megarl check` runs on the nodes: a probe on each, and ranks that meet as those of a role do.

torch is imported in the ranks' methods alone: a probe must say what it sees where torch cannot be imported.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pynvml

from megarl.cluster.workers import EngineWorker

PACKAGES = (
    "megarl",
    "torch",
    "megatron-core",
    "sglang",
    "sglang-kernel",
    "ray",
    "transformers",
    "tokenizers",
    "transformer-engine",
    "triton",
    "numpy",
    "nvidia-nccl-cu13",
)
GREETING = b"megarl check\n"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    total_gb: float
    free_gb: float
    holders: list[str]  # "python 4711, 3.2 GB"


@dataclass(frozen=True)
class NodeReport:
    host: str
    address: str
    versions: dict[str, str]  # of Python, the driver and packages; "none": not installed
    cpus: int
    memory_gb: tuple[float, float]  # available, total
    shared_memory_gb: tuple[float, float]  # free, total; of /dev/shm
    gpus: list[Gpu] = field(default_factory=list)


class NodeProbe:
    def about(self) -> NodeReport:
        import ray

        memory, shared = psutil.virtual_memory(), shutil.disk_usage("/dev/shm")
        driver, gpus = seen_gpus()
        return NodeReport(
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            versions=versions() | ({"NVIDIA driver": driver} if driver else {}),
            cpus=len(os.sched_getaffinity(0)),
            memory_gb=(memory.available / 1e9, memory.total / 1e9),
            shared_memory_gb=(shared.free / 1e9, shared.total / 1e9),
            gpus=gpus,
        )

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def model_state(self, folder: str) -> str:
        return model_state(Path(folder))

    def visit(self, folder: str, name: str, content: str, own_name: str) -> str:
        """Read the driver's marker in a folder and leave one beside it; "" or what is wrong."""
        try:
            if (Path(folder) / name).read_text() != content:
                return f"{name} has another content there"
            (Path(folder) / own_name).write_text(content)
        except OSError as error:
            return f"{error.strerror} ({Path(error.filename).name})"
        return ""

    def listen(self) -> tuple[str, int]:
        """(Address, port) where `reach` of another node finds this one, as long as this process lives."""
        import ray

        address = ray.util.get_node_ip_address()
        listener = socket.create_server((address, 0))
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
        return address, listener.getsockname()[1]

    def reach(self, places: dict[str, tuple[str, int]], timeout_s: float) -> dict[str, str | float]:
        """Milliseconds to each place, or why it cannot be reached."""
        found: dict[str, str | float] = {}
        for name, place in places.items():
            start = time.perf_counter()
            try:
                with socket.create_connection(place, timeout_s) as connection:
                    connection.settimeout(timeout_s)
                    greeting = connection.recv(len(GREETING))
                answered = greeting == GREETING
                found[name] = (time.perf_counter() - start) * 1000 if answered else "something else answers there"
            except OSError as error:
                found[name] = str(error)
        return found


class RankProbe(EngineWorker):
    """A rank with the environment and the backend of a role's, without Megatron."""

    def alive(self) -> None:
        """Answered beside a collective that hangs."""

    def load(self) -> None:
        """Import torch, which takes long where many ranks read it from one file server."""
        import torch.distributed  # noqa: F401

    def meet(self, address: str, port: int, world_size: int, timeout_s: float) -> None:
        """All at the store of rank 0, each on its own."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        timeout, is_first = timedelta(seconds=timeout_s), self.rank == 0
        self.store = TCPStore(address, port, world_size, is_first, timeout, wait_for_workers=False)

    def join(self, world_size: int, timeout_s: float) -> None:
        """A group of all, over the backend that a role has there, and a first sum. ValueError where it is wrong."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        dist.init_process_group(
            backend, store=self.store, rank=self.rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        if ones.item() != world_size:
            raise ValueError(f"the sum of {world_size} ones is {ones.item():g}")

    def all_reduce(self, num_bytes: int, repeats: int) -> float:
        """Seconds of one, the median; ValueError where the sum is wrong."""
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(num_bytes // 4, device=self.device)

        def once() -> None:
            tensor.fill_(self.rank + 1.0)
            dist.all_reduce(tensor)

        seconds = self._timed(once, repeats)
        size = dist.get_world_size()
        if not (tensor == size * (size + 1) / 2).all():
            raise ValueError("all-reduce returned wrong sums")
        return seconds

    def broadcast(self, num_bytes: int, repeats: int) -> float:
        """Seconds of one from rank 0, the median; ValueError where another number arrives."""
        import torch
        import torch.distributed as dist

        tensor = torch.full((num_bytes // 4,), float(self.rank), device=self.device)
        seconds = self._timed(lambda: dist.broadcast(tensor, 0), repeats)
        if tensor.any():
            raise ValueError("broadcast delivered other numbers than those sent")
        return seconds

    def exchange(self, peers: dict[int, int], num_bytes: int, repeats: int) -> float:
        """Seconds of a tensor to this rank's peer, which is to call this too, and of one back; the median."""
        import torch
        import torch.distributed as dist

        peer = peers[self.rank]
        tensor = torch.zeros(num_bytes // 4, device=self.device)

        def there_and_back() -> None:
            for sender in sorted((self.rank, peer)):
                dist.send(tensor, peer) if sender == self.rank else dist.recv(tensor, peer)

        return self._timed(there_and_back, repeats)

    def _timed(self, work: Callable[[], None], repeats: int) -> float:
        import torch

        times = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])  # the first one connects


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found | {"megarl's source": source_digest()}


def source_digest() -> str:
    """Of the code itself: nodes with one version may have different checkouts of it."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def model_state(folder: Path) -> str:
    """Equal for equal models: of config.json's content and the names and sizes of the tensors' files."""
    if not folder.is_dir():
        return "no such folder"
    try:
        config = (folder / "config.json").read_bytes()
        sizes = [(file.name, file.stat().st_size) for file in sorted(folder.glob("*.safetensors"))]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    gigabytes = sum(size for _, size in sizes) / 1e9
    digest = hashlib.sha256(config + repr(sizes).encode()).hexdigest()[:12]
    return f"{len(sizes)} safetensors of {gigabytes:.2f} GB, digest {digest}"


def seen_gpus() -> tuple[str, list[Gpu]]:
    """(Version of the driver, GPUs), whatever CUDA_VISIBLE_DEVICES hides; ("", []) where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return "", []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return pynvml.nvmlSystemGetDriverVersion(), [_gpu(index, handle) for index, handle in enumerate(handles)]
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, handle) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    holders = []
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
        try:
            name = psutil.Process(process.pid).name()
        except psutil.Error:
            name = "a process outside of this container,"
        used = process.usedGpuMemory  # None where the driver does not tell
        holders.append(f"{name} {process.pid}" + (f", {used / 1e9:.1f} GB" if used else ""))
    return Gpu(index, pynvml.nvmlDeviceGetName(handle), memory.total / 1e9, memory.free / 1e9, holders)


def _greet(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(GREETING)
