"""A server that hangs in a broadcast over NCCL, or dies while it generates, on two GPUs; SGLang starts three times: minutes."""

import pytest
import torch
from server_faults import survive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_the_senders_gpu_is_freed_from_a_hanging_broadcast_and_the_server_is_started_again(tmp_path):
    server_args = {"mem_fraction_static": 0.2, "cuda_graph_max_bs": 8}
    rollout = {
        "sampling": {"max_new_tokens": 64},
        "max_retries": 0,
        "server_args": server_args,
        "start_timeout_s": 300.0,
    }
    seen = survive(tmp_path, "cuda", rollout=rollout, sync={"timeout_s": 20.0})
    print("\n".join(seen.lines))
    assert len(seen.killed) == 1 and seen.num_samples == 16 * 8 and seen.versions == [(2, 2)] and seen.restarts == 2
    assert "weight sync to version 2, stage 0" in seen.lines[0] and "within 20 s" in seen.lines[0]
