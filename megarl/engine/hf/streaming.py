"""Weights one at a time: out of a Megatron checkpoint, into one, and into safetensors files.

A tensor is in memory twice: as it is stored, and as it is put together. Nothing grows with the number of them.
"""

import io
import json
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megarl.engine.hf.files import DTYPES, INDEX
from megarl.engine.hf.layout import StoredWeight
from megarl.errors import ConfigError, RunError

COMMON_STATE = "common_state/shard_0_1"  # what of a checkpoint is no tensor: nothing here, but Megatron looks for it
MEGATRON_FORMAT = ("metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
BLOCK = 2**24  # numbers that are converted and written at a time


class StoredTensors:
    """The tensors of a Megatron checkpoint, of which one entry of a stack is read at a time."""

    def __init__(self, folder: Path):
        """Raises ConfigError naming the files that are missing or too short."""
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise ConfigError(f"{folder / '.metadata'} is missing") from error
        except (pickle.UnpicklingError, EOFError) as error:
            raise ConfigError(f"{folder / '.metadata'} is broken: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._places = metadata.storage_data
        self._check_files()
        stored = metadata.state_dict_metadata.items()
        self._tensors = {key: tensor for key, tensor in stored if isinstance(tensor, TensorStorageMetadata)}
        self._chunks: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self.sizes = {key: tensor.size for key, tensor in self._tensors.items()}

    @property
    def files(self) -> list[str]:
        """The names of those that hold tensors."""
        return sorted({place.relative_path for place in self._places.values()})

    def read(self, key: str, index: tuple[int, ...]) -> torch.Tensor:
        """What `tensor[index]` would be; `index` has a number for each dimension of the stack."""
        depth, stored = len(index), self._tensors[key]
        chunk = ChunkStorageMetadata(
            torch.Size([*index, *(0,) * (len(stored.size) - depth)]), torch.Size([*(1,) * depth, *stored.size[depth:]])
        )
        items = create_read_items_for_chunk_list(key, replace(stored, chunks=self._at(key, index)), [chunk])
        if sum(math.prod(item.lengths) for item in items) != math.prod(chunk.sizes):
            raise RunError(f"{self._folder}: {key}{list(index)} is not whole: parts of it are not stored")
        tensor = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
        self._reader.read_data(LoadPlan(items), _Destination(tensor))
        return tensor.view(stored.size[depth:])

    def _at(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """The stored parts of one entry: looking through those of all layers and experts each time would take hours."""
        if (key, len(index)) not in self._chunks:
            by_index = self._chunks[key, len(index)] = {}
            for chunk in self._tensors[key].chunks:
                by_index.setdefault(tuple(chunk.offsets[: len(index)]), []).append(chunk)
        return self._chunks[key, len(index)].get(index, [])

    def _check_files(self) -> None:
        sizes: dict[str, int] = {}
        for place in self._places.values():
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        problems = []
        for file, size in ((self._folder / name, size) for name, size in sorted(sizes.items())):
            if not file.is_file():
                problems.append(f"{file} is missing")
            elif file.stat().st_size < size:
                problems.append(f"{file} has {file.stat().st_size} bytes, and its tensors reach to {size}")
        if problems:
            raise ConfigError("; ".join(problems))


class _Destination:
    """What torch's reader asks of a planner."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._tensor[tuple(slice(start, start + n) for start, n in zip(item.dest_offsets, item.lengths))]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def write_checkpoint(
    folder: Path, weights: list[StoredWeight], read: Callable[[StoredWeight], torch.Tensor], dtype: torch.dtype
) -> None:
    """Into an empty folder, what Megatron's load reads; `read` gives a weight when its turn comes."""
    source = _Source(weights, read, dtype)
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # so that one tensor is asked for at a time
    writer.set_up_storage_writer(is_coordinator=True)
    (plan,), metadata = create_default_global_save_plan([writer.prepare_local_plan(source.plan())])
    (plan,) = writer.prepare_global_plan([plan])
    writer.finish(metadata, [writer.write_data(plan, source).wait()])
    name, content = MEGATRON_FORMAT
    (folder / name).write_text(json.dumps(content))


class _Source:
    """What torch's writer asks of a planner."""

    def __init__(self, weights: list[StoredWeight], read: Callable[[StoredWeight], torch.Tensor], dtype: torch.dtype):
        self._items = {MetadataIndex(w.key, [*w.index, *(0,) * len(w.size)]): w for w in weights}
        self._read, self._dtype = read, dtype
        self._last: torch.Tensor | None = None

    def plan(self) -> SavePlan:
        properties = TensorProperties(dtype=self._dtype)
        items = [WriteItem(MetadataIndex(COMMON_STATE), WriteItemType.BYTE_IO, BytesIOWriteData(0))]
        for index, weight in self._items.items():
            chunk = ChunkStorageMetadata(index.offset, torch.Size([*(1,) * len(weight.stack), *weight.size]))
            data = TensorWriteData(chunk, properties, torch.Size(weight.stack + weight.size))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type == WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([{}], nothing)
            return nothing
        if self._last is not None:
            self._last.untyped_storage().resize_(0)  # it is written; the writer would keep the last one of every key
        weight = self._items[item.index]
        self._last = torch.empty(item.tensor_data.chunk.sizes, dtype=self._dtype)
        for source, target in zip(_blocks(self._read(weight)), _blocks(self._last), strict=True):
            target.copy_(source)
            require_finite(target, weight.key)
        return self._last


def write_safetensors(
    folder: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    shapes: dict[str, torch.Tensor],
    plan: StateDictSplit,
) -> None:
    """The files of `plan`, and their index where there are several. `shapes`: meta tensors of all `tensors`, in the
    dtype that is written."""
    waiting = {file: list(names) for file, names in plan.filename_to_tensors.items()}
    with ExitStack() as stack:
        streams = {}
        for name, tensor in tensors:
            file = plan.tensor_to_filename[name]
            if file not in streams:
                streams[file] = stack.enter_context(open(folder / file, "wb"))
                streams[file].write(safetensors_header({name: shapes[name] for name in waiting[file]}))
            assert waiting[file].pop(0) == name and tensor.shape == shapes[name].shape, f"{name} was not planned"
            for block in _blocks(tensor):
                block = block.to(shapes[name].dtype)
                require_finite(block, name)
                streams[file].write(block.view(torch.uint8).numpy())
            if not waiting[file]:
                streams.pop(file).close()
    assert not any(waiting.values()), f"{waiting} were planned"
    if plan.is_sharded:
        metadata = {"total_parameters": sum(tensor.numel() for tensor in shapes.values()), **plan.metadata}
        index = {"metadata": metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def safetensors_header(shapes: dict[str, torch.Tensor]) -> bytes:
    """Of a file that holds these tensors one after another: https://github.com/huggingface/safetensors#format."""
    names = {getattr(torch, name): code for code, name in DTYPES.items()}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in shapes.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def require_finite(block: torch.Tensor, name: str) -> None:
    if not torch.isfinite(block).all():
        dtype = str(block.dtype).removeprefix("torch.")
        raise RunError(f"{name} holds values that are not finite in {dtype}")


def _blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Flat parts of it, in order."""
    return tensor.reshape(-1).split(BLOCK)
