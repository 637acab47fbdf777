"""The actor's end of weight sync: a pipeline stage's weights as HF tensors, in buckets, broadcast to the servers."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

import torch
import torch.distributed as dist

from megarl.engine import parallel
from megarl.engine.engine import Engine
from megarl.errors import RunError
from megarl.rollout import orders
from megarl.rollout.server import post
from megarl.rollout.weights_group import Bucket, WeightsGroup, describe, fill

FAILURE_S = 1.0  # for a server to say why a broadcast failed


class WeightSender:
    """Sends one pipeline stage; every rank that helps to send has one (`parallel.helps_to_send`), and one of them sends."""

    def __init__(self, engine: Engine, bucket_bytes: int):
        self.engine = engine
        self.buckets = list(buckets_of(engine.hf_shapes(), bucket_bytes))
        self.group: WeightsGroup | None = None
        self.receivers: list[str] = []  # of the group

    def plan(self) -> list[Bucket]:
        """The stage's buckets, in the order in which they are sent; [] on ranks that do not send."""
        return self.buckets if parallel.sends_weights() else []

    def join(
        self, master_address: str, master_port: int, receivers: list[str], group_name: str, timeout_s: float
    ) -> None:
        """Make the broadcast group, as its rank 0; returns when all `receivers`, the servers' ranks by name, are in it.
        Nothing on ranks that do not send.

        A group from before is given up: one of its servers is gone.
        """
        if not parallel.sends_weights():
            return
        if self.group is not None:
            self.group.abort()
        self.receivers = receivers
        world_size = 1 + len(receivers)
        self.group = WeightsGroup(parallel.backend(), master_address, master_port, 0, world_size, group_name, timeout_s)

    def send(self, timeout_s: float) -> None:
        """Broadcast all buckets of the stage: a collective of the ranks that help, and of the servers for each bucket.

        Returns when the servers have loaded them. The next bucket is gathered while one is on the wire. Raises RunError naming
        the bucket whose broadcast failed or was not done after `timeout_s`, and the servers' ranks that report a failure or
        nothing; the ranks that help have then finished all the same.
        """
        if not parallel.sends_weights():
            return self._help()
        with self._filled() as filled:
            on_the_wire = None
            for i, bucket in enumerate(filled):
                arriving, on_the_wire = on_the_wire, self.group.broadcast(bucket)
                if arriving is not None:
                    self._wait(arriving, i - 1, timeout_s)  # its buffer is the next to be filled
            self._wait(on_the_wire, len(self.buckets) - 1, timeout_s)
        if failures := self._failures(timeout_s):
            raise RunError(failures)

    def share(self, servers: dict[str, int], weight_version: str | None, timeout_s: float) -> None:
        """Hand all buckets of the stage to servers (url -> number of ranks) on this machine, by handles of our memory.

        A collective of the ranks that help. The servers load one bucket while the next is gathered; with the last they get
        the version. Raises RunError naming the bucket and the server that failed or did not answer within `timeout_s`.
        """
        if not parallel.sends_weights():
            return self._help()
        parallel.share_memory_by_name()
        answers: list[Future] = []
        with ThreadPoolExecutor(len(servers)) as pool, self._filled() as filled:
            for i, bucket in enumerate(filled):
                parallel.synchronize()
                _wait_answers(answers)
                order = {"do": "load", "bucket": self.buckets[i]}
                version = weight_version if i + 1 == len(self.buckets) else None
                where = f"bucket {i + 1} of {len(self.buckets)}"
                bodies = {url: orders.request(order, ranks, version, bucket) for url, ranks in servers.items()}
                answers = [pool.submit(post, url + orders.PATH, body, timeout_s, where) for url, body in bodies.items()]
            _wait_answers(answers)

    def _help(self) -> None:
        for _ in self.engine.hf_tensors():
            pass

    @contextmanager
    def _filled(self) -> Iterator[Iterator[torch.Tensor]]:
        """The buckets in order, [bytes] uint8 each; of two buffers in turns, so that at most one may still be in use when
        the next is asked for. Gathers to the end whatever happens inside: the ranks that help do so too."""
        tensors = self.engine.hf_tensors()
        largest = max(bucket.num_bytes for bucket in self.buckets)
        buffers = [torch.empty(largest, dtype=torch.uint8, device=parallel.device()) for _ in self.buckets[:2]]
        try:
            yield (fill(buffers[i % 2], islice(tensors, len(bucket.names))) for i, bucket in enumerate(self.buckets))
        finally:
            for _ in tensors:
                pass

    def _wait(self, broadcast: dist.Work, i: int, timeout_s: float) -> None:
        """Until bucket `i` has left its buffer."""
        try:
            self.group.wait(broadcast, timeout_s)
        except RuntimeError as error:
            raise RunError(f"bucket {i + 1} of {len(self.buckets)}: {error}; {self._failures(FAILURE_S)}") from error

    def _failures(self, timeout_s: float) -> str:
        """What the servers' ranks have to say against the transfer."""
        reports = self.group.reports(timeout_s)
        return "; ".join(f"{self.receivers[rank - 1]}: {report}" for rank, report in reports.items() if report)


def _wait_answers(answers: list[Future]) -> None:
    for answer in answers:
        answer.result()


def buckets_of(named_tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Buckets of at most `bucket_bytes`; a larger tensor is one of its own."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield describe(bucket)
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield describe(bucket)
