"""Megatron distributed checkpoints of an Engine: any layout loads what any other saved."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

from megarl.engine.engine import Engine


def save(engine: Engine, folder: str | Path) -> None:
    """Write the weights to `folder` (made here) with all ranks of the role; published under its name when whole."""
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_state(engine), str(partial))
    dist.barrier()
    if dist.get_rank() == 0:
        os.replace(partial, folder)
    dist.barrier()


def load(engine: Engine, folder: str | Path) -> None:
    """Load weights that `save` wrote, whatever the layout then and now."""
    state = dist_checkpointing.load(_state(engine), str(folder))
    engine.model.load_state_dict(state["model"], strict=True)


def _state(engine: Engine) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": engine.model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})}
