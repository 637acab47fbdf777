"""Device, backend, groups and collectives: the only file that knows whether this is ("cuda", nccl) or ("cpu", gloo)."""

import datetime
import math
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.engine import cpu_compat


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def initialize(
    rank: int,
    world_size: int,
    master_address: str,
    master_port: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    seed: int,
    timeout_s: float = 600.0,
) -> None:
    """Join the role's ranks, cut Megatron's groups and seed all generators. Order of ranks: TP fastest, then DP, then PP.

    `timeout_s` bounds the joining, then every collective. Raises torch's DistStoreError where not all ranks join.
    """
    cpu_compat.install()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend(),
        init_method=f"tcp://{master_address}:{master_port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        pipeline_model_parallel_size=pipeline_parallel_size,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # the line above leaves torch's own CPU generator alone


def shutdown() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tensor_parallel_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tensor_parallel_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def pipeline_parallel_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def pipeline_parallel_size() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size()


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def is_first_stage() -> bool:
    return parallel_state.is_pipeline_first_stage()


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage()


def reports_results() -> bool:
    """True on the one rank of each data-parallel replica that has the losses and log-probs: TP 0 of the last stage."""
    return is_last_stage() and tensor_parallel_rank() == 0


def sends_weights() -> bool:
    """True on the one rank of each pipeline stage that sends the stage's weights to the servers: DP 0, TP 0."""
    return data_parallel_rank() == 0 and tensor_parallel_rank() == 0


def barrier() -> None:
    """Of all ranks of the role."""
    dist.barrier()


def is_rank_zero() -> bool:
    return dist.get_rank() == 0


def synchronize() -> None:
    """Wait for what was queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tensor_parallel_max_(tensor: torch.Tensor) -> torch.Tensor:
    return _tensor_parallel_reduce_(tensor, dist.ReduceOp.MAX)


def tensor_parallel_sum_(tensor: torch.Tensor) -> torch.Tensor:
    return _tensor_parallel_reduce_(tensor, dist.ReduceOp.SUM)


def _tensor_parallel_reduce_(tensor: torch.Tensor, operation) -> torch.Tensor:
    if tensor_parallel_size() > 1:
        dist.all_reduce(tensor, operation, group=parallel_state.get_tensor_model_parallel_group())
    return tensor


def tensor_parallel_all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The shards of all tensor-parallel ranks, in rank order, on every rank."""
    if tensor_parallel_size() == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(tensor_parallel_size())]
    dist.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards
