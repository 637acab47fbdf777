"""Megatron distributed checkpoints of an Engine: any layout loads what any other saved.

A role folder holds Megatron's own files, megarl.json with what `load` must know of them, and hf/: config, tokenizer and
generation config of the model, so that it can be exported where the model's folder is gone.
"""

import functools
import json
import math
import random
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.folder import HF_FOLDER, ROLE_FILE, FileRecord, file_names, record
from megarl.engine import optimizer_state, parallel
from megarl.engine.engine import Engine
from megarl.engine.hf.files import copy_small_files
from megarl.engine.hf.streaming import COMMON_STATE, MEGATRON_FORMAT, StoredTensors
from megarl.engine.offload import HostMemory
from megarl.errors import ConfigError, RunError

REFERENCE = "reference."
# transformer-engine's, empty but for FP8: without it both layer implementations read a checkpoint
EXTRA_STATE = re.compile(r".*_extra_state\d*")  # a number where one module holds several experts
DATA_SUFFIX = ".distcp"  # of the files that hold a rank's tensors
FILE_BYTES, NUM_FILES = 2**30, 8  # from which size a rank writes one file more, and how many at most
Entry = tuple[WriteItem, object]  # where in the checkpoint it belongs, what is stored there
_properties = functools.cache(TensorProperties)  # of thousands of tensors: what is one object is gathered once


@dataclass(frozen=True)
class Contents:
    """What of an engine, besides its weights."""

    optimizer: bool = False  # and the state of the random generators
    reference: bool = False


class Writer:
    """Saves one rank's part of an engine, one save at a time: `start` copies it to host memory, a thread writes from
    there while the engine goes on, `finish` waits for the thread. All ranks of the role do the same.

    Files and keys are those of Megatron's torch_dist format. Its own save plans and validates in `start`, which takes
    minutes where there are thousands of experts, and lets ranks wait for one that failed.
    """

    def __init__(self, engine: Engine, model_path: str | Path):
        """`model_path`: the HF folder that the model was built from."""
        self.engine = engine
        self.model_path = Path(model_path)
        self._memory = HostMemory()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def start(self, folder: str | Path, contents: Contents) -> int:
        """Begin to write into a folder that is there and empty; returns the bytes of this rank's tensors.

        When this returns the engine may change. `finish` tells what is wrong with the folder.
        """
        assert self._writing is None, "the last save was not finished"
        self.engine.require("update" if contents.optimizer else "score")
        self.folder = Path(folder)
        self._about = _about(self.engine, contents)
        weights = _weights(self.engine)
        state = weights | _more_state(self.engine, contents, weights)
        apply_factories(state)
        shards = [shard for shard in nested_values(state) if is_main_replica(shard.replica_id)]
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        self._copy_to_host(tensors)
        entries = [_entry(shard) for shard in shards]
        if parallel.is_rank_zero():
            entries.append((WriteItem(MetadataIndex(COMMON_STATE), WriteItemType.BYTE_IO, BytesIOWriteData(0)), [{}]))
        self._items = [item for item, _ in entries]
        self._writing = self._pool.submit(_write, self.folder, torch.distributed.get_rank(), entries)
        return sum(shard.data.nbytes for shard in tensors)

    def is_written(self) -> bool:
        """Whether `finish` would not wait for this rank's files."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> dict[str, FileRecord]:
        """Wait until all is written; the records of this rank's files, by their names in the folder. Collective.

        Raises RunError on the ranks that could not write; what the others return is of no use then.
        """
        assert self._writing is not None, "no save was started"
        writing, self._writing = self._writing, None
        failure = writing.exception()
        results, records = ([], {}) if failure else writing.result()
        gathered = parallel.gather_to_rank_zero((self._items, results))
        if parallel.any_rank(failure is not None):
            if failure is not None:
                raise RunError(f"{self.folder} cannot be written: {failure}") from failure
            return {}
        if parallel.is_rank_zero():  # the other ranks wait for nothing below
            try:
                records |= self._write_index(*zip(*gathered))
            except OSError as error:
                raise RunError(f"{self.folder} cannot be written: {error}") from error
        return records

    def _write_index(
        self, items: Sequence[list[WriteItem]], results: Sequence[list[WriteResult]]
    ) -> dict[str, FileRecord]:
        """What there is once: where the tensors of all ranks are, megarl.json and hf/."""
        _, metadata = create_default_global_save_plan([SavePlan(of_rank) for of_rank in items])
        _check_whole(metadata)
        FileSystemWriter(self.folder).finish(metadata, results)
        name, content = MEGATRON_FORMAT
        (self.folder / name).write_text(json.dumps(content))
        copy_small_files(self.model_path, self.folder / HF_FOLDER)
        if not (self.folder / HF_FOLDER / "config.json").is_file():
            raise RunError(f"{self.model_path} is there no more: {self.folder} would lack config and tokenizer")
        (self.folder / ROLE_FILE).write_text(json.dumps(self._about) + "\n")
        others = (name for name in file_names(self.folder) if not name.endswith(DATA_SUFFIX))
        return {name: record(self.folder / name) for name in others}

    def _copy_to_host(self, shards: list[ShardedTensor]) -> None:
        """Put host copies in the place of the engine's tensors, with the dimensions that stack layers and experts."""
        parts = self._memory.parts([shard.data.nbytes for shard in shards])
        for shard, part in zip(shards, parts):
            copy = part.view(shard.dtype).view(shard.data.shape)
            copy.copy_(shard.data.detach(), non_blocking=True)
            shard.data = copy.view((1,) * shard.prepend_axis_num + tuple(copy.shape))
        parallel.synchronize()


def save(engine: Engine, model_path: str | Path, folder: str | Path, contents: Contents = Contents()) -> None:
    """Write a role folder (made here) with all ranks of the role, and wait for it."""
    if parallel.is_rank_zero():
        Path(folder).mkdir(parents=True)
    parallel.barrier()
    writer = Writer(engine, model_path)
    writer.start(folder, contents)
    writer.finish()
    parallel.barrier()


def load(engine: Engine, folder: str | Path, contents: Contents = Contents()) -> bool:
    """Load what `save` wrote, whatever the layout then and now; each rank by itself.

    Weights alone: before the engine has an optimizer. With the optimizer: into one that has made no step. Returns
    whether the random generators go on where they were: not under another layout. Raises ConfigError where the folder
    is not whole, or does not hold what is asked for, RunError where it cannot be read.
    """
    folder = Path(folder)
    about = json.loads((folder / ROLE_FILE).read_text())
    StoredTensors(folder)  # looks for all files
    if misfits := _misfits(engine, about, contents):
        raise ConfigError(f"{folder} {', and '.join(misfits)}")
    assert contents.optimizer or engine.optimizer is None, "an optimizer holds its own copy of the weights"
    assert not contents.optimizer or optimizer_state.num_steps(engine.optimizer) == 0, "the optimizer has made steps"
    engine.require("update" if contents.optimizer else "score")
    if contents.optimizer and about["optimizer_steps"]:
        optimizer_state.make_moments(engine.optimizer, about["optimizer_steps"])
    if contents.reference:
        engine.reserve_reference(getattr(torch, about["reference"]))
    same_layout = contents.optimizer and about["layout"] == parallel.layout()
    weights = _weights(engine)
    state = weights | _more_state(engine, contents, weights, with_generators=same_layout)
    try:
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    except CheckpointException as error:  # a BaseException: it would end the process
        ((failure, _),) = error.failures.values()
        raise RunError(f"{folder} cannot be loaded: {failure}") from failure
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        missing, unexpected = chunk.load_state_dict(loaded[name], strict=False)
        missing = [key for key in missing if not EXTRA_STATE.fullmatch(key)]
        assert not missing and not unexpected, f"{folder} lacks {missing} and has {unexpected} besides"
    if same_layout:
        _set_generators(loaded["generators"])
    return same_layout


def _about(engine: Engine, contents: Contents) -> dict:
    """megarl.json."""
    about = {"dtype": _name(engine.dtype), "head": engine.head}
    if engine.head == "value":
        about["value_head_bias"] = engine.role.value_head_bias
    if lora := engine.role.lora:
        about["lora"] = lora.model_dump()
    if contents.optimizer:
        about |= {"optimizer_steps": optimizer_state.num_steps(engine.optimizer), "layout": parallel.layout()}
    if contents.reference:
        about["reference"] = _name(engine.reference_tensors()[0][1].dtype)
    return about


def _misfits(engine: Engine, about: dict, contents: Contents) -> list[str]:
    """Why what megarl.json describes cannot be loaded; [] where it can."""
    found = []
    head, dtype = about.get("head", "lm"), _name(engine.dtype)
    lora = engine.role.lora.model_dump() if engine.role.lora else None
    if about.get("lora") != lora:
        found.append(f"was saved with lora: {about.get('lora')}, and this role has {lora}")
    if head != engine.head:
        found.append(f"has a head of the kind {head!r}: {engine.head!r} is needed")
    if contents.optimizer and "optimizer_steps" not in about:
        found.append("holds no optimizer state")
    elif contents.optimizer and about["dtype"] != dtype:
        found.append(f"was saved in {about['dtype']}: its optimizer state does not fit model.dtype {dtype}")
    if contents.reference and "reference" not in about:
        found.append("holds no reference policy")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(engine: Engine) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    states = {}
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        states[name] = {key: value for key, value in state.items() if not EXTRA_STATE.fullmatch(key)}
    return states


def _more_state(engine: Engine, contents: Contents, weights: dict, with_generators: bool = True) -> dict:
    """Under keys of their own; the tensors are those of the engine, so that a load fills them."""
    state = {}
    places = {shard.data: shard for shard in nested_values(weights) if not isinstance(shard, ShardedObject)}
    if contents.optimizer:
        state["optimizer"] = optimizer_state.sharded_state(engine.optimizer, places, engine.optimizer_values)
    if contents.optimizer and with_generators:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["generators"] = ShardedObject("generators", _generators(), (size,), (rank,))
    if contents.reference:
        tensors = engine.reference_tensors()
        state["reference"] = {str(i): _kept(places[p], values) for i, (p, values) in enumerate(tensors)}
    return state


def _kept(place: ShardedTensor | ShardedTensorFactory, values: torch.Tensor) -> ShardedTensor | ShardedTensorFactory:
    """The place of a weight in the reference."""
    fields = {} if isinstance(place, ShardedTensorFactory) else {"dtype": values.dtype}
    return replace(place, key=REFERENCE + place.key, data=values, **fields)


def _chunk_names(engine: Engine) -> list[str]:
    """The keys in memory; on disk a tensor is known by its name in the whole model."""
    return [f"chunk_{i}" for i in range(len(engine.chunks))]


def _generators() -> dict:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {"tensor_parallel": tensor_parallel.get_cuda_rng_tracker().get_states()}


def _set_generators(states: dict) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(states["tensor_parallel"])


def _entry(shard: ShardedTensor | ShardedObject) -> Entry:
    if isinstance(shard, ShardedObject):
        item = WriteItem(MetadataIndex(shard.unique_key), WriteItemType.BYTE_IO, BytesIOWriteData(0))
        return item, [shard.data]  # Megatron's load takes it out of a list
    chunk = ChunkStorageMetadata(torch.Size(shard.global_offset), shard.data.shape)
    data = TensorWriteData(chunk, _properties(dtype=shard.dtype), torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data), shard.data


def _write(folder: Path, rank: int, entries: list[Entry]) -> tuple[list[WriteResult], dict[str, FileRecord]]:
    """The files of one rank, at the same time; none where it has nothing to write. Raises OSError that gives the reason
    where it cannot."""
    if not entries:
        return [], {}
    num_bytes = sum(value.nbytes for _, value in entries if isinstance(value, torch.Tensor))
    parts = _split(entries, min(NUM_FILES, 1 + num_bytes // FILE_BYTES))
    files = [folder / f"__{rank}_{i}{DATA_SUFFIX}" for i in range(len(parts))]
    with ThreadPoolExecutor(len(parts)) as pool:
        written = list(pool.map(_write_file, files, parts))
    return [result for results, _ in written for result in results], {f.name: r for f, (_, r) in zip(files, written)}


def _split(entries: list[Entry], number: int) -> list[list[Entry]]:
    """Into parts of about the same size: the largest first, each to the part that has least."""
    parts: list[list[Entry]] = [[] for _ in range(number)]
    sizes = [0] * number
    for entry in sorted(entries, key=lambda entry: -getattr(entry[1], "nbytes", 0)):
        least = sizes.index(min(sizes))
        parts[least].append(entry)
        sizes[least] += getattr(entry[1], "nbytes", 0)
    return [part for part in parts if part]


def _write_file(file: Path, entries: list[Entry]) -> tuple[list[WriteResult], FileRecord]:
    results = []
    try:
        with open(file, "wb") as stream:
            for item, value in entries:
                start = stream.tell()
                torch.save(value, stream)
                size = stream.tell() - start
                results.append(WriteResult(item.index, size, _StorageInfo(file.name, start, size)))
        return results, record(file)
    except RuntimeError as error:  # torch says that its archive is cut short, and not why
        raise error.__context__ if isinstance(error.__context__, OSError) else error  # noqa: B904


def _check_whole(metadata: Metadata) -> None:
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            stored = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
            assert stored == math.prod(tensor.size), f"{stored} numbers of {key} {list(tensor.size)} are stored"
