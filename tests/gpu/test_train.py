"""The whole loop on two GPUs: actor on one, server on the other, weights by NCCL. SGLang captures and compiles: minutes."""

import pytest
import torch
from end_to_end import ROOT, Run, steps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_the_quickstart_learns_on_gpus_and_trainer_and_server_agree(tmp_path):
    overrides = (
        "name=test",
        "device=cuda",
        "model.dtype=bfloat16",
        "trainer.steps=30",
        "roles.actor.gpus_per_node=1",
        "roles.actor.tensor_parallel=1",
        "roles.actor.offload=all",
        "rollout.server_args={cuda_graph_max_bs: 8, mem_fraction_static: 0.3}",
    )
    with Run(tmp_path, str(ROOT / "configs/quickstart.yaml"), *overrides) as run:
        code = run.wait(500)
        print(run.output[-6000:])
        assert code == 0, "\n".join(p.read_text()[-3000:] for p in (tmp_path / "runs/test/logs").glob("*.log"))
    found = steps(tmp_path / "runs/test")
    assert all(m["rollout/logprob_diff_mean"] < 0.05 for m in found)
    # contexts and libraries: the server generates elsewhere
    assert all(0 < m["memory/generate_gpu_gb"] < 5 for m in found)
    rewards = [m["reward/mean"] for m in found]
    assert sum(rewards[-10:]) > sum(rewards[:10]) + 1.0
