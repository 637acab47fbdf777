"""Megatron distributed checkpoints of an Engine: any layout loads what any other saved.

A checkpoint is a folder with Megatron's own files and `hf/`: config, tokenizer and generation config of the model, so
that it can be exported where the model's folder is gone.
"""

import json
import os
import queue
import re
import shutil
from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megarl.engine import parallel
from megarl.engine.engine import Engine

HF_FOLDER = "hf"
# transformer-engine's, empty but for FP8: without it both layer implementations read a checkpoint
EXTRA_STATE = re.compile(r".*_extra_state\d*")  # a number where one module holds several experts
SMALL_FILES = ("*.json", "*.model", "*.jinja", "*.txt")  # of an HF folder: all but weights
NAMED_TEMPLATES = "additional_chat_templates"


def save(engine: Engine, model_path: str | Path, folder: str | Path) -> None:
    """Write the weights to `folder` (made here) with all ranks of the role; published under its name when whole.

    `model_path`: the HF folder that the model was built from.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    engine.require("score")
    if parallel.is_rank_zero():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    parallel.barrier()
    # Megatron would start a process to gather what this one's writing threads report: it imports for half a minute.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_state(engine), str(partial))
    parallel.barrier()
    if parallel.is_rank_zero():
        copy_small_files(Path(model_path), partial / HF_FOLDER)
        about = {"dtype": str(engine.dtype).removeprefix("torch."), "head": engine.head}
        if engine.head == "value":
            about["value_head_bias"] = engine.role.value_head_bias
        (partial / "megarl.json").write_text(json.dumps(about))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    parallel.barrier()


def load(engine: Engine, folder: str | Path) -> None:
    """Load weights that `save` wrote, whatever the layout then and now; before the engine has an optimizer."""
    assert engine.optimizer is None, "an optimizer holds its own copy of the weights"
    engine.require("score")
    state = dist_checkpointing.load(_state(engine), str(folder))
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        missing, unexpected = chunk.load_state_dict(state[name], strict=False)
        missing = [key for key in missing if not EXTRA_STATE.fullmatch(key)]
        assert not missing and not unexpected, f"{folder} lacks {missing} and has {unexpected} besides"


def copy_small_files(source: Path, target: Path) -> None:
    target.mkdir()
    for file in (file for pattern in SMALL_FILES for file in source.glob(pattern)):
        if not file.name.endswith(".index.json"):  # of the old weights' shards
            shutil.copy2(file, target)
    if (source / NAMED_TEMPLATES).is_dir():
        shutil.copytree(source / NAMED_TEMPLATES, target / NAMED_TEMPLATES)


def _state(engine: Engine) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "singleton_local_shards": False}
    states = {}
    for name, chunk in zip(_chunk_names(engine), engine.chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        states[name] = {key: value for key, value in state.items() if not EXTRA_STATE.fullmatch(key)}
    return states


def _chunk_names(engine: Engine) -> list[str]:
    """The keys in memory; on disk a tensor is known by its name in the whole model."""
    return [f"chunk_{i}" for i in range(len(engine.chunks))]
