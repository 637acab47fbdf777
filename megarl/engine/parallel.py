"""Device, backend, groups and collectives: the only file that knows whether this is ("cuda", nccl) or ("cpu", gloo)."""

import datetime
import math
import os
import random
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megarl.config import RoleConfig
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
    layout: RoleConfig,
    seed: int,
    timeout_s: float = 600.0,
) -> None:
    """Join the role's ranks, cut Megatron's groups and seed all generators. Order of ranks: TP fastest, then CP, DP, PP.

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
    interleaved = layout.virtual_pipeline_parallel > 1
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_parallel if interleaved else None,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor_parallel,
        distributed_timeout_minutes=math.ceil(timeout_s / 60),
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)  # the line above leaves torch's own CPU generator alone
    random.seed(seed)
    np.random.seed(seed)


def shutdown() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def tensor_parallel_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def tensor_parallel_size() -> int:
    return parallel_state.get_tensor_model_parallel_world_size()


def expert_tensor_parallel_rank() -> int:
    return parallel_state.get_expert_tensor_parallel_rank()


def expert_tensor_parallel_size() -> int:
    return parallel_state.get_expert_tensor_parallel_world_size()


def expert_parallel_rank() -> int:
    return parallel_state.get_expert_model_parallel_rank()


def expert_parallel_size() -> int:
    return parallel_state.get_expert_model_parallel_world_size()


def pipeline_parallel_rank() -> int:
    return parallel_state.get_pipeline_model_parallel_rank()


def pipeline_parallel_size() -> int:
    return parallel_state.get_pipeline_model_parallel_world_size()


def virtual_pipeline_size() -> int:
    """Model chunks of each pipeline rank: 1 where pipelines are not interleaved."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


def context_parallel_rank() -> int:
    return parallel_state.get_context_parallel_rank()


def context_parallel_size() -> int:
    return parallel_state.get_context_parallel_world_size()


def data_parallel_rank() -> int:
    return parallel_state.get_data_parallel_rank()


def data_parallel_size() -> int:
    return parallel_state.get_data_parallel_world_size()


def holds_embedding(chunk: int) -> bool:
    return parallel_state.is_pipeline_first_stage() and chunk == 0


def holds_head(chunk: int) -> bool:
    return parallel_state.is_pipeline_last_stage() and chunk == virtual_pipeline_size() - 1


def reports_results() -> bool:
    """True on the one rank of each data-parallel replica that returns the losses and log-probs: TP 0 and CP 0 of the last
    stage."""
    return parallel_state.is_pipeline_last_stage() and tensor_parallel_rank() == 0 and context_parallel_rank() == 0


def sends_weights() -> bool:
    """True on the one rank of each pipeline stage that sends the stage's weights to the servers: DP 0, CP 0, TP 0."""
    return data_parallel_rank() == 0 and context_parallel_rank() == 0 and tensor_parallel_rank() == 0


def helps_to_send() -> bool:
    """True on the ranks that gather with the sending rank of their stage: its TP ranks, or all of the stage where the
    experts are spread over more ranks than those."""
    spread = expert_parallel_size() > 1 or expert_tensor_parallel_size() > tensor_parallel_size()
    return spread or (data_parallel_rank() == 0 and context_parallel_rank() == 0)


def layout() -> dict[str, int]:
    """What decides which rank holds what."""
    return {
        "world": dist.get_world_size(),
        "tensor": tensor_parallel_size(),
        "context": context_parallel_size(),
        "pipeline": pipeline_parallel_size(),
        "virtual_pipeline": virtual_pipeline_size(),
        "expert": expert_parallel_size(),
        "expert_tensor": expert_tensor_parallel_size(),
    }


def barrier() -> None:
    """Of all ranks of the role."""
    dist.barrier()


def is_rank_zero() -> bool:
    return dist.get_rank() == 0


def device_module() -> ModuleType:
    """torch.cuda, or torch.cpu, which has streams and events that do nothing."""
    return torch.get_device_module(device())


def synchronize() -> None:
    """Wait for what was queued on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free_cache() -> None:
    """Give the allocator's unused blocks back to the device."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def lock_pages(host: torch.Tensor) -> None:
    """Page-lock host memory, so that copies to and from the GPU run at full speed and beside other work."""
    if torch.cuda.is_available() and host.numel():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0)))


def unlock_pages(host: torch.Tensor) -> None:
    if torch.cuda.is_available() and host.numel():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())))


def share_memory_by_name() -> None:
    """Give other processes our CPU tensors by names in /dev/shm: descriptors need a process that inherits from ours."""
    torch.multiprocessing.set_sharing_strategy("file_system")


def used_bytes() -> int:
    """What is taken of this rank's GPU by all that runs on it, contexts and libraries included; 0 on CPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank of the role."""
    flags = torch.tensor(float(flag), device=device())
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def gather_to_rank_zero(value: object) -> list | None:
    """The values of all ranks of the role on its first one; None on the others."""
    gathered = [None] * dist.get_world_size() if is_rank_zero() else None
    dist.gather_object(value, gathered)
    return gathered


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
    return _all_gather(tensor, tensor_parallel_size(), parallel_state.get_tensor_model_parallel_group())


def expert_tensor_parallel_all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same over the ranks that split one expert's matrices."""
    return _all_gather(tensor, expert_tensor_parallel_size(), parallel_state.get_expert_tensor_parallel_group())


def expert_parallel_all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all expert-parallel ranks, in rank order, on every rank."""
    return _all_gather(tensor, expert_parallel_size(), parallel_state.get_expert_model_parallel_group())


def context_parallel_all_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all context-parallel ranks, in rank order, on every rank."""
    return _all_gather(tensor, context_parallel_size(), parallel_state.get_context_parallel_group())


def _all_gather(tensor: torch.Tensor, size: int, group) -> list[torch.Tensor]:
    """Of meta tensors only the shapes, without the other ranks."""
    if size == 1 or tensor.is_meta:
        return [tensor] * size
    gathered = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(gathered, tensor.contiguous(), group=group)
    return gathered
