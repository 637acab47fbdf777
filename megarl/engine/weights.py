"""The actor's end of weight sync: a pipeline stage's weights as HF tensors, in buckets, broadcast to the servers."""

import torch.distributed as dist

from megarl.engine import parallel
from megarl.engine.engine import Engine
from megarl.rollout.weights_group import Bucket, describe, flatten, init_weights_group


class WeightSender:
    """Sends one pipeline stage; every rank that helps to send has one (`parallel.helps_to_send`), and one of them sends."""

    def __init__(self, engine: Engine, bucket_bytes: int):
        self.engine = engine
        self.bucket_bytes = bucket_bytes
        self.group: dist.ProcessGroup | None = None

    def plan(self) -> list[Bucket]:
        """The stage's buckets, in the order in which `send` broadcasts them; [] on ranks that do not send."""
        buckets = [describe(bucket) for bucket in self._buckets()]
        return buckets if parallel.sends_weights() else []

    def join(self, master_address: str, master_port: int, world_size: int, group_name: str, timeout_s: float) -> None:
        """Make the broadcast group, as its rank 0; returns when all server ranks are in it. Nothing on other ranks."""
        if parallel.sends_weights():
            backend = parallel.backend()
            self.group = init_weights_group(backend, master_address, master_port, 0, world_size, group_name, timeout_s)

    def send(self) -> None:
        """Broadcast all buckets of the stage: a collective of the ranks that help, and of the servers for each bucket.

        The next bucket is gathered while one is on the wire, so there are two of them at most.
        """
        on_the_wire = None
        for bucket in self._buckets():
            flat = flatten(bucket) if parallel.sends_weights() else None
            if on_the_wire is not None:
                on_the_wire.wait()
            if flat is not None:
                on_the_wire = dist.broadcast(flat, src=0, group=self.group, async_op=True)
        if on_the_wire is not None:
            on_the_wire.wait()
        parallel.synchronize()

    def _buckets(self):
        """Lists of (HF name, tensor) of at most `bucket_bytes`; a larger tensor is a bucket of its own."""
        bucket, size = [], 0
        for name, tensor in self.engine.hf_tensors():
            if bucket and size + tensor.nbytes > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        yield bucket
