"""The optimizer steps of an iteration: mini-batches of its samples through the actor, and the critic beside it."""

import random
from collections.abc import Callable
from functools import partial

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.prepare import keywords_of
from megarl.algorithms.value_loss import value_loss
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.monitor.console import Console
from megarl.monitor.skipped import SkippedUpdates, why_skipped
from megarl.sample import Sample
from megarl.schedule import learning_rate


# (where its result goes, its samples, what waits for it) of updates that run
Started = list[tuple["Results", list[Sample], Callable[[], dict[str, float]]]]


class Updater:
    def __init__(self, config: Config, actor: RoleGroup, critic: RoleGroup | None, console: Console, skipped: SkippedUpdates):
        self.config = config
        self.actor = actor
        self.critic = critic
        self.console = console
        self.skipped = skipped
        algorithm = config.algorithm
        self.entropy = algorithm.entropy_coefficient > 0
        self.in_turns = critic is not None and config.placement == "colocated"  # on the same GPUs, one after the other
        keywords = keywords_of(policy_loss, algorithm) | {"aggregation_length": config.aggregation_length}
        self.policy_loss = partial(policy_loss, kind=algorithm.policy_loss, **keywords)
        self.value_loss = partial(value_loss, clip=algorithm.value_clip)

    def run(self, samples: list[Sample], step: int, kl_coefficient: float) -> dict[str, float]:
        """All of them; metrics. `kl_coefficient`: of the loss.

        For the actor a mini-batch with neither an advantage nor a KL or entropy term has nothing to teach: its weights
        and its optimizer's state stay as they are, weight decay and momentum included.
        """
        steps, roles = self.config.trainer.steps, self.config.roles
        only_critic = step <= self.config.algorithm.critic_warmup_steps
        rate = learning_rate(roles.actor.optimizer, step, steps)
        critic_rate = learning_rate(roles.critic.optimizer, step, steps) if self.critic else 0.0
        loss = partial(self.policy_loss, kl_coefficient=kl_coefficient)
        temperature = self.config.rollout.sampling.temperature
        policy, value = Results("loss/policy"), Results("loss/value")

        def start_critic(mini_batch: list[Sample]) -> Started:
            return [(value, mini_batch, self.critic.start_train_step(mini_batch, self.value_loss, critic_rate))]

        def start_actor(mini_batch: list[Sample]) -> Started:
            teaches = kl_coefficient > 0 or self.entropy or any(sample.advantages.any() for sample in mini_batch)
            if only_critic or not teaches:
                return []
            return [(policy, mini_batch, self.actor.start_train_step(mini_batch, loss, rate, temperature, self.entropy))]

        mini_batches = list(self.mini_batches(samples, step))
        if self.in_turns:
            self.wait([started for batch in mini_batches for started in start_critic(batch)], step)
            self.critic.place("generate")
            self.actor.place("update")
            self.wait([started for batch in mini_batches for started in start_actor(batch)], step)
        else:
            for batch in mini_batches:
                self.wait([*(start_critic(batch) if self.critic else ()), *start_actor(batch)], step)
        if not policy.num_tried and not only_critic:
            self.console.line("warning: no sample has an advantage (are the rewards of every group equal?), so this step changes nothing")
        metrics = {"learning_rate": rate}
        if self.critic:
            metrics |= {"critic/learning_rate": critic_rate} | value.means(
                {"critic/grad_norm": "grad_norm"}, {"critic/clip_ratio": "value_clipped", "critic/error": "value_error"}
            )
        if only_critic:
            return metrics
        return metrics | policy.means({"grad_norm": "grad_norm"}, {"clip/ratio": "clipped", "kl/old": "kl_old"})

    def wait(self, started: Started, step: int) -> None:
        for results, mini_batch, wait in started:
            result = wait()
            results.num_tried += 1
            if result["skipped"]:
                self.skipped.add(f"step_{step:06d}", mini_batch, why_skipped(result))
            else:
                results.add(result, mini_batch)

    def mini_batches(self, samples: list[Sample], step: int):
        """`algorithm.epochs` times all samples, each time in another order."""
        size = self.config.algorithm.mini_batch_size or len(samples)
        for epoch in range(self.config.algorithm.epochs):
            order = list(samples)
            random.Random(f"{self.config.seed} {step} {epoch}").shuffle(order)
            yield from (order[i : i + size] for i in range(0, len(order), size))


class Results:
    """Sums over the updates of one role."""

    def __init__(self, loss: str):
        self.loss = loss  # what its mean is called; with the KL and entropy terms, if there are any
        self.num_tried = 0
        self.updates: list[dict[str, float]] = []  # but for those that were skipped
        self.num_tokens = 0

    def add(self, result: dict[str, float], mini_batch: list[Sample]) -> None:
        self.updates.append(result)
        self.num_tokens += sum(int(sample.loss_mask.sum()) for sample in mini_batch)

    def means(self, per_update: dict[str, str], per_token: dict[str, str]) -> dict[str, float]:
        """name of the metric -> mean of a key of the results: 0 where there was nothing to do, none where all was skipped."""
        if self.num_tried and not self.updates:
            return {}

        def sums(key: str) -> float:
            return sum(update[key] for update in self.updates)

        counts = [(per_update | {self.loss: "loss"}, len(self.updates)), (per_token, self.num_tokens)]
        return {name: sums(key) / max(count, 1) for keys, count in counts for name, key in keys.items()}
