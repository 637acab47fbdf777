"""AdamW whose master weights and moments live in host memory and pass through the device in each update, part by part.

The same kernels work on the same numbers as with all of them on the device: no bit of an update differs. While one part
is updated, the next one comes and the last one leaves.
"""

import itertools
from collections.abc import Iterator
from types import ModuleType

import torch
from megatron.core.optimizer import DistributedOptimizer

from megarl.engine import parallel
from megarl.engine.offload import HostMemory, bytes_of

PART_BYTES = 2**30  # of master weights and moments; three parts are on the device at the same time
Part = list[list[torch.nn.Parameter]]  # by group of the optimizer


class HostOptimizer:
    """Takes over the update of one DistributedOptimizer, and the memory of what that keeps."""

    def __init__(self, distributed: DistributedOptimizer):
        self._adam = distributed.optimizer
        groups = (distributed.shard_fp32_from_float16_groups, distributed.shard_float16_groups)
        self._weights = {  # master -> this rank's range of the weight that follows it; none where it is the weight itself
            master: weight for masters, weights in zip(*groups) for master, weight in zip(masters, weights)
        }
        self._parts = list(parts_of(self._adam.param_groups, PART_BYTES))
        parameters = [parameter for part in self._parts for parameter in flat(part)]
        masters = [parameter.nbytes for parameter in parameters if parameter in self._weights]
        moments = [parameter.nbytes for parameter in parameters for _ in range(2)]
        self._memory = HostMemory()
        self._room = self._memory.parts(masters + moments)  # in the order in which `_take` will meet them
        self._host: dict[int, torch.Tensor] = {}  # storage on the device -> its bytes in host memory
        self._update = self._adam.step
        self._adam.step = self.step
        distributed._copy_main_params_to_model_params = lambda: None  # `step` does it, while a part is there
        for part in self._parts:
            self._take(part)
            parallel.synchronize()
            self._free(part)

    @torch.no_grad()
    def step(self) -> None:
        """AdamW on all parts, and the weights after the masters."""
        if not self._parts:  # a rank without a range
            return
        device = parallel.device_module()
        computing, bringing, taking = device.current_stream(), device.Stream(), device.Stream()
        groups = self._adam.param_groups
        brought, taken = self._bring(self._parts[0], device, bringing), None
        for i, part in enumerate(self._parts):
            here = brought
            if i + 1 < len(self._parts):
                brought = self._bring(self._parts[i + 1], device, bringing)
            computing.wait_event(here)
            self._adam.param_groups = [{**group, "params": members} for group, members in zip(groups, part)]
            self._update()
            for parameter in flat(part):
                if parameter in self._weights:
                    self._weights[parameter].copy_(parameter)
            taking.wait_stream(computing)
            with device.stream(taking):
                self._take(part)
            if i > 0:
                computing.wait_event(taken)  # what takes this memory next comes after
                self._free(self._parts[i - 1])
            taken = taking.record_event()
        computing.wait_event(taken)
        self._free(self._parts[-1])
        for group, updated in zip(groups, self._adam.param_groups):
            if "step" in updated:  # of transformer-engine's AdamW
                group["step"] = updated["step"]
        self._adam.param_groups = groups
        parallel.synchronize()

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Between updates: a master weight or moment as it is in host memory, a view; any other tensor itself."""
        host = self._host.get(tensor.untyped_storage()._cdata)
        return tensor if host is None else host.view(tensor.dtype).view(tensor.shape)

    def _bring(self, part: Part, device: ModuleType, stream: torch.Stream) -> torch.Event:
        for storage in self._kept(part):
            storage.resize_(self._host[storage._cdata].nbytes)
        stream.wait_stream(device.current_stream())  # which may have used the memory until now
        with device.stream(stream):
            for storage in self._kept(part):
                bytes_of(storage).copy_(self._host[storage._cdata], non_blocking=True)
        return stream.record_event()

    def _take(self, part: Part) -> None:
        for storage in self._kept(part):
            if storage._cdata not in self._host:  # a moment that the first update has made
                self._host[storage._cdata] = next(self._room)
            self._host[storage._cdata].copy_(bytes_of(storage), non_blocking=True)

    def _free(self, part: Part) -> None:
        for storage in self._kept(part):
            storage.resize_(0)

    def _kept(self, part: Part) -> Iterator[torch.UntypedStorage]:
        """What there is so far of masters and moments, each in a storage of its own."""
        for parameter in flat(part):
            if parameter in self._weights:
                yield parameter.untyped_storage()
            states = self._adam.state.get(parameter, {}).values()
            yield from (x.untyped_storage() for x in states if isinstance(x, torch.Tensor) and x.dim() > 0)


def parts_of(groups: list[dict], part_bytes: int) -> Iterator[Part]:
    """The parameters of all groups in order, cut where a part's masters and moments would exceed `part_bytes`."""
    part, taken = [[] for _ in groups], 0
    for i, group in enumerate(groups):
        for parameter in group["params"]:
            size = 3 * parameter.nbytes
            if taken and taken + size > part_bytes:
                yield part
                part, taken = [[] for _ in groups], 0
            part[i].append(parameter)
            taken += size
    if taken:
        yield part


def flat(part: Part) -> Iterator[torch.nn.Parameter]:
    return itertools.chain.from_iterable(part)
