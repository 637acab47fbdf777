"""The distributed optimizer's state as parts of whole tensors, so that any layout reads what any other wrote.

A data-parallel rank holds one range of a parameter's flattened master weights and moments. Megatron's reshardable
format first gathers all of them on every rank, which takes host memory and time for the whole model per rank. Here a
range is cut into boxes of the whole tensor instead: torch's distributed checkpoint stores those, and reads any others
from them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer

Weights = Mapping[torch.nn.Parameter, ShardedTensor | ShardedTensorFactory]
PREFIX = "optimizer."


def sharded_state(
    optimizer: ChainedOptimizer, weights: Weights, values: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, ShardedTensor]:
    """This rank's part of the master weights, unless they are the weights themselves, and of the moments, once there
    are some: views of them, so that a load into these fills them. `weights`: each parameter's place in the model;
    `values`: `Engine.optimizer_values`."""
    boxes = [
        box
        for distributed in optimizer.chained_optimizers
        for parameter, start in _held(distributed)
        for name, flat in _states(distributed, parameter)
        for box in boxes_of(weights[parameter], f"{PREFIX}{name}.", values(flat), start)
    ]
    return {str(i): box for i, box in enumerate(boxes)}


def num_steps(optimizer: ChainedOptimizer) -> int:
    """Updates that were made so far."""
    steps = [0]
    for distributed in optimizer.chained_optimizers:
        steps += [group["step"] for group in distributed.optimizer.param_groups if "step" in group]  # fused Adam
        steps += [state["step"] for state in distributed.optimizer.state.values() if "step" in state]  # torch's
    return int(max(steps))


def make_moments(optimizer: ChainedOptimizer, steps: int) -> None:
    """Have moments, of undefined values, and the count of updates; what master weights there are becomes undefined."""
    for distributed in optimizer.chained_optimizers:
        distributed._copy_model_grads_to_main_grads()  # Megatron's own way takes memory for them once more
        distributed.optimizer.step()
        distributed.optimizer.zero_grad()
        for group in distributed.optimizer.param_groups:
            if "step" in group:
                group["step"] = steps
        for state in distributed.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(steps)


def _held(distributed: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, int]]:
    """(parameter, where in it, flattened, this rank's range begins)."""
    for ranges in distributed.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, place in bucket["param_map"].items():
                    yield parameter, place["param"].start


def _states(distributed: DistributedOptimizer, parameter: torch.nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    states = distributed._get_main_param_and_optimizer_states(parameter)
    master = states.pop("param")
    if master.untyped_storage()._cdata != parameter.untyped_storage()._cdata:
        yield "master", master.detach()
    yield from ((name, state) for name, state in sorted(states.items()) if name != "step")


def boxes_of(
    weight: ShardedTensor | ShardedTensorFactory, prefix: str, flat: torch.Tensor, start: int
) -> Iterator[ShardedTensor]:
    """Views of `flat`, which are the entries of a weight's shard from `start` on, as boxes of the whole tensor."""
    shards = nested_values(weight.build()) if isinstance(weight, ShardedTensorFactory) else [weight]
    for shard in shards:
        assert shard.data.is_contiguous(), f"{shard.key} is not contiguous"
        first = (shard.data.data_ptr() - weight.data.data_ptr()) // shard.data.element_size()
        begin, end = max(start, first), min(start + flat.numel(), first + shard.data.numel())
        for corner, sizes, offset in boxes(shard.local_shape, begin - first, end - first):
            before = (1,) * shard.prepend_axis_num
            part = flat[begin + offset - start :][: math.prod(sizes)].view(*before, *sizes)
            corner = (*(0,) * shard.prepend_axis_num, *corner)
            yield replace(
                shard,
                key=prefix + shard.key,
                data=part,
                dtype=part.dtype,
                local_shape=tuple(part.shape),
                global_offset=tuple(map(sum, zip(shard.global_offset, corner))),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*shard.replica_id[:2], 0),  # no other data-parallel rank has it
            )


def boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(corner, sizes, offset from `begin`) of boxes that, one after another, are the entries from `begin` up to `end`
    of a tensor of `shape` in row-major order: part of a row, whole rows, part of a row, and so on inside of those
    parts."""
    if begin >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # inside of one row
        yield from _within(shape, last, begin, end, begin)
        return
    if begin < first * row:
        yield from _within(shape, first - 1, begin, first * row, begin)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]), first * row - begin
    if last * row < end:
        yield from _within(shape, last, last * row, end, begin)


def _within(shape, index: int, begin: int, end: int, origin: int):
    """Boxes of a part of one row."""
    row = math.prod(shape[1:])
    for corner, sizes, offset in boxes(shape[1:], begin - index * row, end - index * row):
        yield (index, *corner), (1, *sizes), offset + begin - origin
