"""What NVML says of this process's memory."""

import os

import pytest
import torch

from megarl.machine import gpu_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")]


def test_the_memory_that_a_process_holds_of_its_gpu_grows_by_what_it_takes():
    def held() -> int:
        torch.cuda.synchronize()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
        (num_bytes,) = gpu_memory(gpus, [os.getpid()]).values()
        return num_bytes

    torch.cuda.init()
    kept = torch.ones(1, device="cuda")
    before = held()
    taken = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    assert held() - before == pytest.approx(2**30, abs=2**26)
    del taken
    torch.cuda.empty_cache()
    assert held() - before == pytest.approx(0, abs=2**26) and before > kept.nbytes
