"""Run a function on a few gloo ranks that share this process's imports: what every distributed test is built on."""

import multiprocessing
import time
import traceback

import torch

from megarl.config import ModelConfig, RoleConfig
from megarl.rollout.server import free_port

# A fork server pays Megatron's imports once; but these look for GPUs, and CUDA does not survive a fork.
CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
if not torch.cuda.is_available():
    CONTEXT.set_forkserver_preload(["megarl.engine.engine", "megarl.engine.checkpoint"])


def run_ranks(function, world_size: int, *args, timeout_s: float = 120, **layout):
    """[function(rank, *args) for each rank], each in its own process with Megatron's groups of RoleConfig(**layout) set up.

    An error on one rank fails the test with that rank's traceback; the others are killed.
    """
    port = free_port("127.0.0.1")
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        place = (rank, world_size, "127.0.0.1", port, RoleConfig(**layout))
        process = CONTEXT.Process(target=_rank_main, args=(sender, function, place, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    deadline = time.monotonic() + timeout_s
    results = {}
    try:
        while len(results) < world_size:
            ready = multiprocessing.connection.wait([p for r, p in enumerate(pipes) if r not in results], timeout=1)
            for pipe in ready:
                rank = pipes.index(pipe)
                ok, value = pipe.recv()
                assert ok, f"rank {rank} of {world_size} failed:\n{value}"
                results[rank] = value
            assert time.monotonic() < deadline, (
                f"ranks {set(range(world_size)) - results.keys()} silent for {timeout_s} s"
            )
    finally:
        for process in processes:
            process.join(timeout=10 if len(results) == world_size else 0)
            process.kill()
            process.join()
    return [results[rank] for rank in range(world_size)]


def make_engine(folder, dtype: str = "float32", max_tokens: int = 1000, transformer_impl: str = "auto", **role):
    """An Engine on the groups of this rank; `role`: what RoleConfig holds besides groups."""
    from megarl.engine.engine import Engine

    model = ModelConfig(path=str(folder), dtype=dtype, transformer_impl=transformer_impl)
    return Engine(model, RoleConfig(max_tokens_per_gpu=max_tokens, **role))


def _rank_main(sender, function, place, args):
    from megarl.engine import parallel

    try:
        parallel.initialize(*place, seed=1)
        sender.send((True, function(place[0], *args)))
        parallel.shutdown()
    except BaseException:
        sender.send((False, traceback.format_exc()))
