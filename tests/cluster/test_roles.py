"""Two Megatron roles with layouts and optimizers of their own, on real Ray, and what is said when their ranks end."""

import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from hf_models import write_hf_model

from megarl.algorithms.losses import sft_loss
from megarl.cluster.cluster import Cluster
from megarl.config import Config
from megarl.errors import RunError
from megarl.sample import Prompt, Sample


def pid_that_says(handle, words: str) -> int:
    """The rank's process id; it has printed `words`."""

    def say(worker):
        print(words, flush=True)
        return os.getpid()

    return ray.get(handle.__ray_call__.remote(say), timeout=60)


def test_actor_and_critic_train_side_by_side_under_different_layouts(tmp_path):
    model = write_hf_model(tmp_path / "model", "qwen2", True, vocab_size=101, num_layers=2)
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "t"},
            "roles": {
                "actor": {"gpus_per_node": 2, "tensor_parallel": 2, "optimizer": {"learning_rate": 1e-2}},
                "critic": {"gpus_per_node": 1, "offload": "all", "cpus_per_rank": 0.25, "optimizer": {"learning_rate": 1e-3}},
            },
            "rollout": {"cpus_per_server": 0.25},
            "cluster": {"start_timeout_s": 200},
        }
    )
    def squared_error(values, batch):  # here, so that it travels to the workers by value
        return torch.where(batch.loss_mask, (values - 1) ** 2, 0.0).sum() / batch.num_loss_tokens, {}

    samples = [Sample.from_response(Prompt([], [5]), [6, 7, 8], group_id=0, index=i) for i in range(2)]
    with pytest.raises(RunError) as failure, Cluster(config, "cpu", tmp_path / "logs") as cluster:
        actor, critic = cluster.start_role("actor"), cluster.start_role("critic")
        assert actor.live_paths["layers"] == "local (torch)" and actor.live_paths["attention"].startswith("SDPA")
        for role, settings in ((actor, config.roles.actor), (critic, config.roles.critic)):
            role.use_optimizer(settings.optimizer)
        actor_losses, critic_losses = [], []
        for _ in range(4):
            actor_losses.append(actor.train_step(samples, sft_loss, config.roles.actor.optimizer.learning_rate)["loss"])
            critic.place("update")
            critic_losses.append(critic.train_step(samples, squared_error, config.roles.critic.optimizer.learning_rate)["loss"])
            critic.place("generate")
        assert actor_losses == sorted(actor_losses, reverse=True) and critic_losses == sorted(critic_losses, reverse=True)
        with pytest.raises(RunError, match="values: critic rank 0 failed with AssertionError: place.'score'. comes first"):
            critic.values(samples)
        critic.place("score")
        values = critic.values(samples)
        assert [v.shape for v in values] == [torch.Size([4])] * 2 and values[0][0] == 0 and values[0][1] != 0
        os.kill(pid_that_says(actor.handles[1], "the actor's"), signal.SIGKILL)
        os.kill(hung := pid_that_says(critic.handles[0], "the critic's"), signal.SIGSTOP)
        critic.call_timeout_s = 1
        critic.values(samples)
    message = str(failure.value)
    assert message.startswith("values: no answer within 1 s (cluster.call_timeout_s) from critic rank 0\nactor rank 1 died; log ")
    assert "logs/actor-1.log:\n" in message and "  | the actor's\n" in message
    assert "critic rank 0 does not answer within 5 s; log " in message and message.endswith("  | the critic's")
    assert "actor rank 0" not in message  # it waits for the next call
    assert not Path(f"/proc/{hung}").exists()
