"""Tensors moved to host memory and back in place: their storages are emptied, so every view of them stays valid."""

from collections.abc import Iterable

import torch


class HostCopy:
    """Where a set of storages waits while its device memory serves others. The host memory is kept for the next time."""

    def __init__(self):
        self._host: dict[int, tuple[torch.UntypedStorage, torch.Tensor | None, int]] = {}

    def move_out(self, tensors: Iterable[torch.Tensor], keep_values: bool = True) -> None:
        """Empty the storages of `tensors`; without `keep_values` they come back as zeros."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0:  # a view of one that is out already
                continue
            _, host, _ = self._host.get(storage._cdata, (None, None, 0))
            if keep_values:
                if host is None or host.numel() != size:
                    host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
                host.copy_(_bytes(storage))
            self._host[storage._cdata] = storage, host if keep_values else None, size
            storage.resize_(0)

    def move_in(self) -> None:
        for storage, host, size in self._host.values():
            if storage.nbytes():
                continue
            storage.resize_(size)
            values = _bytes(storage)
            values.zero_() if host is None else values.copy_(host, non_blocking=True)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
