"""Two Megatron roles with layouts and optimizers of their own, on real Ray, and what is said when their ranks end."""

import os
import signal
import socket
from pathlib import Path

import pytest
import ray
import torch
from hf_models import write_hf_model

from megarl.algorithms.losses import sft_loss
from megarl.cluster.cluster import Cluster
from megarl.config import Config, RoleConfig
from megarl.errors import RunError
from megarl.rewards.model import begin_on_ranks
from megarl.sample import Prompt, Sample


def pid_that_says(handle, words: str) -> int:
    """The rank's process id; it has printed `words`."""

    def say(worker):
        print(words, flush=True)
        return os.getpid()

    return ray.get(handle.__ray_call__.remote(say), timeout=60)


def engine_of(role) -> tuple[str, RoleConfig, list[str]]:
    """Of rank 0: the folder it started from, its settings, and the tensors of its head."""

    def look(worker):
        head = worker.engine.chunks[-1].output_layer
        return str(worker.writer.model_path), worker.engine.role, [name for name, _ in head.named_parameters()]

    return ray.get(role.handles[0].__ray_call__.remote(look), timeout=60)


def hold_gpu_memory(*roles) -> None:
    """As there is no GPU: each rank says that it holds its number + 1 bytes of GPU 0."""

    def hold(worker):
        from megarl.cluster import workers

        workers.gpu_memory = lambda gpus, pids: {0: worker.rank + 1} if pids == [os.getpid()] else {}

    ray.get([handle.__ray_call__.remote(hold) for role in roles for handle in role.handles], timeout=60)


def gpu_memory_of(cluster) -> dict:
    assert cluster.gpu_memory() == {}  # nobody is asked on CPU
    cluster.device = "cuda"
    try:
        return cluster.gpu_memory()
    finally:
        cluster.device = "cpu"


def test_actor_and_critic_train_side_by_side_under_different_layouts(tmp_path, monkeypatch):
    model = write_hf_model(tmp_path / "model", "qwen2", True, vocab_size=101, num_layers=2)
    write_hf_model(tmp_path / "critic", "qwen2", True, vocab_size=101, num_layers=1)
    monkeypatch.chdir(tmp_path)  # the ranks' working directory is another one
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "t"},
            "roles": {
                "actor": {"gpus_per_node": 2, "tensor_parallel": 2, "optimizer": {"learning_rate": 1e-2}},
                "critic": {
                    "path": "critic",
                    "gpus_per_node": 1,
                    "offload": "all",
                    "cpus_per_rank": 0.25,
                    "optimizer": {"learning_rate": 1e-3},
                },
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
        assert engine_of(actor) == (str(model), config.roles.actor, [])  # tied: no head of its own
        assert engine_of(critic) == (str(tmp_path / "critic"), config.roles.critic, ["weight", "bias"])
        for role, settings in ((actor, config.roles.actor), (critic, config.roles.critic)):
            role.use_optimizer(settings.optimizer)
        actor_losses, critic_losses = [], []
        for _ in range(4):
            actor_losses.append(actor.train_step(samples, sft_loss, config.roles.actor.optimizer.learning_rate)["loss"])
            critic.place("update")
            critic_losses.append(
                critic.train_step(samples, squared_error, config.roles.critic.optimizer.learning_rate)["loss"]
            )
            critic.place("generate")
        node = socket.gethostname()
        hold_gpu_memory(actor, critic)
        assert gpu_memory_of(cluster) == {("actor", node, 0): 1 + 2, ("critic", node, 0): 1}
        assert actor_losses == sorted(actor_losses, reverse=True) and critic_losses == sorted(
            critic_losses, reverse=True
        )
        with pytest.raises(
            RunError, match="values: critic rank 0 failed with AssertionError: place.'score'. comes first"
        ):
            critic.values(samples)
        critic.place("score")
        values = critic.values(samples)
        assert [v.shape for v in values] == [torch.Size([4])] * 2 and values[0][0] == 0 and values[0][1] != 0
        os.kill(pid_that_says(actor.handles[1], "the actor's"), signal.SIGKILL)
        os.kill(hung := pid_that_says(critic.handles[0], "the critic's"), signal.SIGSTOP)
        assert gpu_memory_of(cluster) == {("actor", node, 0): 1}  # of those that answer
        critic.call_timeout_s = 1
        critic.values(samples)
    message = str(failure.value)
    assert message.startswith(
        "values: no answer within 1 s (cluster.call_timeout_s) from critic rank 0\nactor rank 1 died; log "
    )
    assert "logs/actor-1.log:\n" in message and "  | the actor's\n" in message
    assert "critic rank 0 does not answer within 5 s; log " in message and message.endswith("  | the critic's")
    assert "actor rank 0" not in message  # it waits for the next call
    assert not Path(f"/proc/{hung}").exists()


@pytest.mark.soak
def test_a_reward_model_is_an_actor_with_a_value_head_and_its_run_has_no_servers(tmp_path):
    model = write_hf_model(tmp_path / "model", "qwen2", True, vocab_size=101, num_layers=1)
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "t"},
            "algorithm": {"name": "reward_model"},
            "roles": {"actor": {"max_tokens_per_gpu": 64, "optimizer": {"weight_decay": 0.1}}},
            "cluster": {"start_timeout_s": 200},
        }
    )
    with Cluster(config, "cpu", tmp_path / "logs") as cluster:
        cluster.start_servers()
        cluster.check_servers()
        assert cluster.wait_servers() == []
        actor = cluster.start_role("actor", head="value")
        path, role, head = engine_of(actor)
        assert path == str(model) and head == ["weight"]
        assert {name: getattr(role, name) for name in RoleConfig.model_fields} == dict(config.roles.actor)
        (values,) = actor.values([Sample.from_response(Prompt([], [5]), [6, 7, 8], group_id=0, index=0)])
        assert values[0] == 0 and values[1:].count_nonzero() == 3
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["actor-0.log"]


@pytest.mark.soak
@torch.no_grad()
def test_the_engine_of_a_reward_is_frozen_and_stays_where_it_is(tmp_path):
    from transformers import AutoModelForSequenceClassification

    model = write_hf_model(tmp_path / "model", "qwen2", True, vocab_size=101, num_layers=1)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    classifier.score.weight.normal_()
    classifier.save_pretrained(tmp_path / "reward")
    config = Config.model_validate(
        {
            "name": "x",
            "placement": "colocated",
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"train": "t"},
            "roles": {"actor": {"cpus_per_rank": 0.25}, "reward_model": {"path": str(tmp_path / "reward")}},
            "rollout": {"cpus_per_server": 0.25},
            "cluster": {"start_timeout_s": 200},
        }
    )
    sequences = [[5, 6, 7], [8, 9, 10, 11], [12, 6]]
    with Cluster(config, "cpu", tmp_path / "logs") as cluster:
        ranks = cluster.start_role("reward_model")
        path, role, head = engine_of(ranks)
        assert path == str(tmp_path / "reward") and head == ["weight", "bias"] and role.offload is None
        scores = [score for _, score in begin_on_ranks(ranks, sequences)()]
        os.kill(pid_that_says(ranks.handles[0], "the reward model's"), signal.SIGKILL)
        with pytest.raises(RunError, match="values: the process of reward_model rank 0 died"):
            begin_on_ranks(ranks, sequences)()
    expected = [classifier(torch.tensor([ids])).logits.item() for ids in sequences]
    assert scores == pytest.approx(expected, abs=1e-5)
