"""Device tensors in host memory: moved there and back in place, or copied."""

import itertools
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch

from megarl.data.packing import padded
from megarl.engine import parallel

_ALIGNMENT = 64


class HostMemory:
    """One block of host memory, page-locked where there is a GPU, grown at need and kept for the next time.

    One, for torch's own page-locked allocations are rounded up to powers of two. On pages of its own, unlocked before
    they are freed: CUDA locks whole pages, takes those of freed memory for locked still and refuses to lock one again.
    """

    def __init__(self):
        self._pages: mmap.mmap | bytes = b""
        self._unlock = weakref.finalize(self, lambda: None)

    def parts(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Disjoint uint8 tensors of `sizes` bytes, each with a storage of its own; what earlier ones held is lost."""
        aligned = [padded(size, _ALIGNMENT) for size in sizes]
        if sum(aligned) > len(self._pages):
            self._unlock()
            self._pages = mmap.mmap(-1, sum(aligned), mmap.MAP_PRIVATE)
            block = torch.frombuffer(self._pages, dtype=torch.uint8)
            parallel.lock_pages(block)
            self._unlock = weakref.finalize(self, parallel.unlock_pages, block)
        offsets = itertools.accumulate(aligned, initial=0)
        return (_bytes_at(self._pages, offset, size) for offset, size in zip(offsets, sizes))


class MovedTensors:
    """Tensors whose memory serves others meanwhile: their storages are emptied, so every view of them stays valid."""

    def __init__(self):
        self._memory = HostMemory()
        self._moved: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def move_out(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor] = ()) -> None:
        """Empty the storages of all; those `dropped` come back as zeros. Nothing where they are out already."""
        if self._moved:
            return
        kept, dropped = _storages(kept), _storages(dropped)
        for storage, part in zip(kept, self._memory.parts([storage.nbytes() for storage in kept])):
            part.copy_(bytes_of(storage), non_blocking=True)
            self._moved.append((storage, storage.nbytes(), part))
        self._moved += [(storage, storage.nbytes(), None) for storage in dropped]
        parallel.synchronize()
        for storage, _, _ in self._moved:
            storage.resize_(0)

    def move_in(self) -> None:
        for storage, size, part in self._moved:
            storage.resize_(size)
            values = bytes_of(storage)
            values.zero_() if part is None else values.copy_(part, non_blocking=True)
        self._moved = []


class Snapshot:
    """The values of tensors at one time, in host memory."""

    def __init__(self):
        self._memory = HostMemory()
        self.parts: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        """In `dtype`; None: in their own."""
        for part, tensor in zip(self.reserve(tensors, dtype), tensors):
            part.copy_(tensor, non_blocking=True)
        parallel.synchronize()

    def reserve(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Room for such values, undefined as yet."""
        dtypes = [dtype or tensor.dtype for tensor in tensors]
        parts = self._memory.parts([tensor.numel() * kept.itemsize for tensor, kept in zip(tensors, dtypes)])
        self.parts = [part.view(kept).view(tensor.shape) for part, kept, tensor in zip(parts, dtypes, tensors)]
        return self.parts

    def average(self, tensors: Sequence[torch.Tensor], decay: float) -> None:
        """Become decay * itself + (1 - decay) * tensors."""
        for part, tensor in zip(self.parts, tensors, strict=True):
            part.lerp_(tensor.to(part.device, part.dtype), 1 - decay)


def _bytes_at(pages: mmap.mmap, offset: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(pages, dtype=torch.uint8, offset=offset, count=size)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each once, in order."""
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
