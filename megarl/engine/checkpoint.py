"""Megatron distributed checkpoints of an Engine: any layout loads what any other saved.

A role folder holds Megatron's own files, megarl.json with what `load` must know of them, and hf/: config, tokenizer and
generation config of the model, so that it can be exported where the model's folder is gone.
"""

import json
import queue
import random
import re
import shutil
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
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.checkpoint.folder import ROLE_FILE, FileRecord, file_names, record
from megarl.engine import optimizer_state, parallel
from megarl.engine.engine import Engine
from megarl.engine.offload import HostMemory, Snapshot
from megarl.errors import RunError

HF_FOLDER = "hf"
REFERENCE = "reference."
# transformer-engine's, empty but for FP8: without it both layer implementations read a checkpoint
EXTRA_STATE = re.compile(r".*_extra_state\d*")  # a number where one module holds several experts
SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")  # of an HF folder: all but weights
DATA_SUFFIX = ".distcp"  # of Megatron's files that hold a rank's tensors
NAMED_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class Contents:
    """What of an engine, besides its weights."""

    optimizer: bool = False  # and the state of the random generators
    reference: bool = False


class Writer:
    """Saves one rank's part of an engine, one save at a time: `start` copies it to host memory, a thread writes from
    there while the engine goes on, `finish` waits for the thread. All ranks of the role do the same."""

    def __init__(self, engine: Engine, model_path: str | Path):
        """`model_path`: the HF folder that the model was built from."""
        self.engine = engine
        self.model_path = Path(model_path)
        self._memory = HostMemory()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def start(self, folder: str | Path, contents: Contents) -> int:
        """Begin to write into a folder that is there and empty; returns the bytes of this rank's tensors.

        When this returns the engine may change. Collective.
        """
        assert self._writing is None, "the last save was not finished"
        self.folder, self.contents = Path(folder), contents
        self.engine.require("update" if contents.optimizer else "score")
        state = _weights(self.engine) | _more_state(self.engine, contents)
        num_bytes = self._copy_to_host(state)
        # Megatron would start a process to gather what the writing threads report: it imports for half a minute.
        filesystem_async._results_queue = queue.Queue()
        self._request = dist_checkpointing.save(
            state, str(folder), async_sharded_save=True, async_strategy="mcore", validate_access_integrity=False
        )
        self._writing = self._pool.submit(_write, self._request, self.folder)
        return num_bytes

    def is_written(self) -> bool:
        """Whether `finish` would not wait for this rank's files."""
        return self._writing is not None and self._writing.done()

    def finish(self) -> dict[str, FileRecord]:
        """Wait until all is written; the records of this rank's files, by their names in the folder. Collective.

        Raises RunError on the ranks whose files could not be written; on the others nothing is returned then.
        """
        writing, self._writing = self._writing, None
        failure = writing.exception()
        if parallel.any_rank(failure is not None):
            if failure is not None:
                raise RunError(f"{self.folder} cannot be written: {failure}") from failure
            return {}
        for finalize in self._request.finalize_fns:
            finalize()
        records, self._request = writing.result(), None
        if parallel.is_rank_zero():
            self._describe()
            others = (name for name in file_names(self.folder) if not name.endswith(DATA_SUFFIX))
            records |= {name: record(self.folder / name) for name in others}
        return records

    def _describe(self) -> None:
        """megarl.json and hf/."""
        copy_small_files(self.model_path, self.folder / HF_FOLDER)
        engine = self.engine
        about = {"dtype": str(engine.dtype).removeprefix("torch."), "head": engine.head}
        if engine.head == "value":
            about["value_head_bias"] = engine.role.value_head_bias
        if self.contents.optimizer:
            about |= {"optimizer_steps": self._steps, "layout": parallel.layout()}
        if self.contents.reference:
            about["reference"] = str(engine.reference_tensors()[0][1].dtype).removeprefix("torch.")
        (self.folder / ROLE_FILE).write_text(json.dumps(about) + "\n")

    def _copy_to_host(self, state: dict) -> int:
        """Put host copies in the place of the tensors that this rank writes."""
        if self.contents.optimizer:
            self._steps = optimizer_state.num_steps(self.engine.optimizer)
        apply_factories(state)
        shards = [shard for shard in nested_values(state) if isinstance(shard, ShardedTensor)]
        shards = [shard for shard in shards if is_main_replica(shard.replica_id)]
        parts = self._memory.parts([shard.data.nbytes for shard in shards])
        for shard, part in zip(shards, parts):
            copy = part.view(shard.dtype).view(shard.data.shape)
            copy.copy_(shard.data.detach(), non_blocking=True)
            shard.data = copy
        parallel.synchronize()
        return sum(shard.data.nbytes for shard in shards)


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
    """Load what `save` wrote, whatever the layout then and now. Collective.

    Weights alone: before the engine has an optimizer. With the optimizer: into one that has made no step. Returns
    whether the random generators go on where they were: not under another layout.
    """
    folder = Path(folder)
    about = json.loads((folder / ROLE_FILE).read_text())
    assert contents.optimizer or engine.optimizer is None, "an optimizer holds its own copy of the weights"
    engine.require("update" if contents.optimizer else "score")
    if contents.optimizer and about["optimizer_steps"]:
        optimizer_state.make_moments(engine.optimizer, about["optimizer_steps"])
    if contents.reference:
        engine.reserve_reference(getattr(torch, about["reference"]))
    same_layout = contents.optimizer and about["layout"] == parallel.layout()
    state = _weights(engine) | _more_state(engine, contents, with_generators=same_layout)
    loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        missing, unexpected = chunk.load_state_dict(loaded[name], strict=False)
        missing = [key for key in missing if not EXTRA_STATE.fullmatch(key)]
        assert not missing and not unexpected, f"{folder} lacks {missing} and has {unexpected} besides"
    if same_layout:
        _set_generators(loaded["generators"])
    return same_layout


def copy_small_files(source: Path, target: Path) -> None:
    target.mkdir()
    for file in (file for pattern in SMALL_FILES for file in source.glob(pattern)):
        if not file.name.endswith(".index.json"):  # of the old weights' shards
            shutil.copy2(file, target)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, target / NAMED_TEMPLATES)


def _weights(engine: Engine) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    states = {}
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        states[name] = {key: value for key, value in state.items() if not EXTRA_STATE.fullmatch(key)}
    return states


def _more_state(engine: Engine, contents: Contents, with_generators: bool = True) -> dict:
    """Under keys of their own; the tensors are those of the engine, so that a load fills them."""
    state = {}
    places = {shard.data: shard for shard in nested_values(_weights(engine)) if not isinstance(shard, ShardedObject)}
    if contents.optimizer:
        state["optimizer"] = optimizer_state.sharded_state(engine.optimizer, places)
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


def _write(request, folder: Path) -> dict[str, FileRecord]:
    """All files of the rank. Megatron's own loop over them keeps of an error only its type."""
    if request.async_fn is None:  # this rank has none
        return {}
    transforms, _ = request.async_fn.args
    _, buckets, reports = request.async_fn_args
    results, records = {}, {}
    for i, bucket in enumerate(buckets):
        arguments = {"local_proc_idx": i, "write_bucket": bucket, "results_queue": None, "count_queue": None}
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        _, results[i] = write(transforms, use_fsync=True, **arguments)
        if isinstance(results[i], Exception):
            raise results[i]
        name = Path(bucket[0]).name
        records[name] = record(folder / name)
    reports.put(results)
    return records
