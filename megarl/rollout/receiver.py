"""The servers' end of a weight sync. SGLang calls `receive` in each rank of a server (its option --custom-weight-loader).

SGLang's own calls need an HTTP round trip of some 4 ms for each bucket; a GB takes 3 ms over NVLink. So one call here
receives all buckets of a stage, the next one on the wire while one is loaded.
"""

import json
import logging
from collections.abc import Iterator

import torch

from megarl.rollout.weights_group import Bucket, WeightsGroup

logger = logging.getLogger(__name__)
_groups: dict[str, WeightsGroup] = {}


def receive(model, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Do what `orders.request` asks for in the name of the only tensor: join a group, receive its buckets, or load a
    bucket that lies in the tensor.

    What goes wrong with received buckets is told to the sender, through the group's store. An exception ends the server.
    """
    ((message, shared),) = named_tensors
    order = json.loads(message)
    if order["do"] == "load":
        model.load_weights(Bucket(*order["bucket"]).tensors(shared))
        synchronize()  # the answer lets the sender use its memory again
        return
    name = order["group"]
    if order["do"] == "join":
        prefix = name.rpartition("-")[0]  # PREFIX-STAGE
        for old in [old for old in _groups if old.rpartition("-")[0] != prefix]:  # of an earlier join
            _groups.pop(old).abort()
        rank = order["rank_offset"] + torch.distributed.get_rank()
        _groups[name] = WeightsGroup(
            order["backend"], order["address"], order["port"], rank, order["world_size"], name, order["timeout_s"]
        )
    else:
        load(model, _groups[name], [Bucket(*bucket) for bucket in order["buckets"]])


def load(model, group: WeightsGroup, buckets: list[Bucket]) -> None:
    received = receive_all(group, buckets, next(model.parameters()).device)
    error = ""
    try:
        model.load_weights(received)
    except Exception as failure:
        logger.exception("megarl: loading weights failed")
        error = f"{type(failure).__name__}: {failure}"
    try:
        for _ in received:  # the others must not wait for this rank
            pass
        synchronize()
    except RuntimeError as failure:
        logger.exception("megarl: receiving weights failed")
        error = error or f"{type(failure).__name__}: {failure}"
    group.report(error)


def receive_all(group: WeightsGroup, buckets: list[Bucket], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) of all buckets. A tensor is a view of one of two buffers: use it before the next bucket's first.

    Raises RuntimeError naming the bucket that failed or did not come within the group's timeout."""
    largest = max(bucket.num_bytes for bucket in buckets)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    on_the_wire = group.broadcast(buffers[0][: buckets[0].num_bytes])
    for i, bucket in enumerate(buckets):
        try:
            group.wait(on_the_wire, group.timeout_s)
        except RuntimeError as error:
            raise RuntimeError(f"bucket {i + 1} of {len(buckets)}: {error}") from error
        if i + 1 < len(buckets):
            on_the_wire = group.broadcast(buffers[(i + 1) % 2][: buckets[i + 1].num_bytes])
        yield from bucket.tensors(buffers[i % 2])


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
