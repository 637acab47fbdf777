"""A weight broadcast group: rank 0 is a sending rank of the actor, the others are the ranks of SGLang servers.

Both ends use it (engine/weights.py and, inside the servers, receiver.py), so it imports nothing but torch.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d
from torch.distributed.rendezvous import rendezvous

POLL_S = 0.0002  # a bucket takes milliseconds


class WeightsGroup:
    """Stands beside a process's default group: `src=0` and the ranks are this group's own."""

    def __init__(
        self,
        backend: str,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        name: str,
        timeout_s: float,
    ):
        """Join the group; blocks until all `world_size` ranks have, at most `timeout_s`. Rank 0 hosts the store.

        A server of tensor parallel n is n ranks. Torch itself ends a collective after twice that time; deadlines of ours come
        first. Raises torch.distributed.DistStoreError or RuntimeError when the others do not come in time.
        """
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.store, _, _ = next(rendezvous(f"tcp://{master_address}:{master_port}", rank, world_size, timeout=timeout))
        self.store.set_timeout(timeout)
        with _survivable() if rank == 0 else contextlib.nullcontext():
            self.group, _ = distributed_c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                distributed_c10d.Backend(backend),
                PrefixStore(name, self.store),
                group_name=name,
                timeout=2 * timeout,
            )
        distributed_c10d._world.pg_group_ranks[self.group] = {i: i for i in range(world_size)}
        self._transfers = 0
        self._connect("cuda" if backend == "nccl" else "cpu")

    def _connect(self, device: str) -> None:
        """The first broadcast, which with NCCL makes the communicator and would wait for the others for ever."""
        token = torch.zeros(1, device=device)
        outcome: list[str] = []

        def run() -> None:
            try:
                with torch.cuda.device(token.device) if token.is_cuda else contextlib.nullcontext():
                    self.broadcast(token).wait()
                    token.item()
                outcome.append("")
            except RuntimeError as error:
                outcome.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run, name="joining a weights group", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if not outcome:
            raise RuntimeError(
                f"not all {self.world_size} ranks of a weights group were there within {self.timeout_s:g} s"
            )
        if outcome[0]:
            raise RuntimeError(f"the first broadcast of a weights group failed: {outcome[0]}")

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Start to send `tensor` (rank 0) or to receive into it."""
        return dist.broadcast(tensor, src=0, group=self.group, async_op=True)

    def wait(self, work: dist.Work, timeout_s: float) -> None:
        """Raises RuntimeError where the broadcast failed or is not over in time; then the group is of no more use, but its
        kernel does not keep the GPU."""
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                self.abort()
                raise RuntimeError(f"not received by all servers within {timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()

    def report(self, error: str = "") -> None:
        """A server's rank: the buckets of one transfer are loaded, or what went wrong."""
        self.store.set(f"{self._transfers}/{self.rank}", error)
        self._transfers += 1

    def reports(self, timeout_s: float) -> dict[int, str]:
        """Rank 0: what each other rank reported of the transfer; "no answer ..." for those that do not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        found = {}
        for rank in range(1, self.world_size):
            key = f"{self._transfers}/{rank}"
            try:
                self.store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
                found[rank] = self.store.get(key).decode()
            except RuntimeError:  # DistStoreError among them
                found[rank] = f"no answer within {timeout_s:g} s"
        self._transfers += 1
        return found

    def abort(self) -> None:
        """Give the group up without its other ranks: one of them may be dead, or hang in a broadcast."""
        self.group.abort()


@contextlib.contextmanager
def _survivable():
    """A group made here does not end this process when a peer of it is gone: torch's NCCL watchdog would."""
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(variable)
    os.environ[variable] = "2"  # CleanUpOnly
    try:
        yield
    finally:
        os.environ.pop(variable)
        if before is not None:
            os.environ[variable] = before


class Bucket(NamedTuple):
    """What both ends must know of a bucket before it is sent."""

    names: list[str]
    dtypes: list[str]  # "bfloat16"
    shapes: list[list[int]]

    @property
    def sizes(self) -> list[int]:
        """Of the tensors, in bytes."""
        return [
            math.prod(shape) * getattr(torch, dtype).itemsize
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def tensors(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of a buffer ([bytes] uint8) that `fill` has filled with this bucket."""
        parts = buffer[: self.num_bytes].split(self.sizes)
        for name, dtype, shape, part in zip(self.names, self.dtypes, self.shapes, parts):
            yield name, part.view(getattr(torch, dtype)).view(shape)


def describe(named_tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    names = [name for name, _ in named_tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors]
    shapes = [list(tensor.shape) for _, tensor in named_tensors]
    return Bucket(names, dtypes, shapes)


def fill(buffer: torch.Tensor, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The part of `buffer` ([bytes] uint8) that the tensors then take, one after another; each is let go once it is in.

    The other end views each slice as its dtype again, which needs an aligned start: with mixed dtypes, put the wider ones
    first. Raises ValueError for no tensor at all or one that would start off its alignment.
    """
    end = 0
    for name, tensor in named_tensors:
        start, end = end, end + tensor.nbytes
        if start % tensor.element_size() != 0:
            raise ValueError(f"{name} ({tensor.dtype}) would start at byte {start} of a bucket; wider dtypes go first")
        buffer[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    if end == 0:
        raise ValueError("a weight bucket must hold at least one tensor")
    return buffer[:end]
