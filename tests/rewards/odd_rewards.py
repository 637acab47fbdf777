"""Rewards for the tests of the pool: well and badly behaved ones."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import torch


def place(sample, *, factor=1):
    return sample.index * factor


async def place_async(sample):
    await asyncio.sleep(0.05)
    return {"place": sample.index, "loop": id(asyncio.get_running_loop()), "pid": os.getpid()}


def place_of_all(samples):
    return [{"reward": sample.index, "number": len(samples)} for sample in samples]


async def place_of_all_async(samples):
    await asyncio.sleep(0.05)
    return [sample.index for sample in samples]


def value(sample, *, value):
    return value


def values(samples, *, values):
    return values


def raise_error(sample):
    raise ValueError(f"no such thing: {sample.prompt.answer}")


def raise_text(sample, *, text):
    raise ValueError(text)


async def raise_error_async(sample):
    raise asyncio.CancelledError("by itself")


def process(sample):
    """What a reward sees of its process, and what the sample is there."""
    print("a reward speaks", flush=True)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert sample.rollout_logprobs is None and sample.prompt.metadata["source"]
    assert isinstance(sample.token_ids, torch.Tensor) and sample.loss_mask.dtype == torch.bool
    return {"threads": torch.get_num_threads(), "pid": os.getpid(), "group": os.getpgid(0)}


def late(sample, *, how):
    """Hangs on sample 3."""
    if sample.index == 3 and how == "sleep":
        time.sleep(1000)
    if sample.index == 3 and how == "compute":
        9**9**9  # one call into C, which holds the lock of the interpreter
    return sample.index


async def late_async(sample):
    try:
        await asyncio.sleep(1000 if sample.index == 3 else 0.1)
    except asyncio.CancelledError:  # as badly behaved clients do
        pass
    return sample.index


async def blocking_async(sample):
    if sample.index == 3:
        time.sleep(1000)
    return sample.index


def late_of_all(samples):
    time.sleep(1000)


async def late_of_all_async(samples):
    await asyncio.sleep(1000)


def dying(sample, *, how):
    """Ends its process on sample 3."""
    if sample.index == 3:
        {"exit": lambda: os._exit(7), "sys.exit": lambda: sys.exit(8), "crash": lambda: ctypes.string_at(0)}[how]()
    return sample.index


def with_child(sample, *, pid_file):
    """Hangs, and so does a process that it starts."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(str(child.pid))
    9**9**9  # one call into C, which holds the lock of the interpreter
