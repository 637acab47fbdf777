"""The optimizer steps of an iteration: mini-batches of its samples through the actor, and the critic beside it."""

import random
from collections.abc import Callable
from functools import partial

from megarl.algorithms.losses import policy_loss
from megarl.algorithms.value_loss import value_loss
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.monitor.console import Console
from megarl.monitor.skipped import SkippedUpdates, why_skipped
from megarl.prepare import keywords_of
from megarl.sample import Sample
from megarl.schedule import learning_rate

# an update that runs: where its result goes, its samples, what waits for it
Started = tuple["Results", list[Sample], Callable[[], dict[str, float]]]


class Updater:
    def __init__(
        self,
        config: Config,
        actor: RoleGroup,
        critic: RoleGroup | None,
        console: Console,
        skipped: SkippedUpdates,
    ):
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

        A mini-batch without a trained token, and for the actor one with neither an advantage nor a KL or entropy term,
        has nothing to teach: weights and the optimizer's state stay as they are, weight decay and momentum included.
        The actor's schedule begins after the steps in which only the critic is trained.
        """
        steps, roles = self.config.trainer.steps, self.config.roles
        warmup = self.config.algorithm.critic_warmup_steps
        only_critic = step <= warmup
        rate = 0.0 if only_critic else learning_rate(roles.actor.optimizer, step - warmup, steps - warmup)
        critic_rate = learning_rate(roles.critic.optimizer, step, steps) if self.critic else 0.0
        loss = partial(self.policy_loss, kl_coefficient=kl_coefficient)
        temperature = self.config.rollout.sampling.temperature
        policy, value = Results("actor", "loss/policy"), Results("critic", "loss/value")

        def start_critic(batch: list[Sample]) -> Started:
            return value, batch, self.critic.start_train_step(batch, self.value_loss, critic_rate)

        def start_actor(batch: list[Sample]) -> Started:
            return policy, batch, self.actor.start_train_step(batch, loss, rate, temperature, self.entropy)

        def teaches(batch: list[Sample]) -> bool:
            return not only_critic and (kl_coefficient > 0 or self.entropy or any(map(has_advantage, batch)))

        batches = [batch for batch in self.mini_batches(samples, step) if any(s.loss_mask.any() for s in batch)]
        if self.in_turns:
            for batch in batches:
                self.wait([start_critic(batch)], step)
            teaching = [batch for batch in batches if teaches(batch)]
            if teaching:
                self.critic.place("generate")
                self.actor.place("update")
            for batch in teaching:
                self.wait([start_actor(batch)], step)
        else:
            for batch in batches:
                started = [start_critic(batch)] if self.critic else []
                started += [start_actor(batch)] if teaches(batch) else []
                self.wait(started, step)
        if not policy.num_tried and not only_critic:
            self.console.line(
                "warning: no sample has an advantage (are the rewards of every group equal?): this step teaches the "
                "policy nothing"
            )
        metrics = {} if only_critic else {"learning_rate": rate}
        if self.critic:
            metrics |= {"critic/learning_rate": critic_rate} | value.means(
                {"critic/grad_norm": "grad_norm"}, {"critic/clip_ratio": "value_clipped", "critic/error": "value_error"}
            )
        if only_critic:
            return metrics
        return metrics | policy.means({"grad_norm": "grad_norm"}, {"clip/ratio": "clipped", "kl/old": "kl_old"})

    def wait(self, started: list[Started], step: int) -> None:
        for results, mini_batch, wait in started:
            result = wait()
            results.num_tried += 1
            if result["skipped"]:
                self.skipped.add(f"step_{step:06d}", mini_batch, f"{results.role}: {why_skipped(result)}")
            else:
                results.add(result, mini_batch)

    def mini_batches(self, samples: list[Sample], step: int):
        """`algorithm.epochs` times all samples, each time in another order."""
        size = self.config.algorithm.mini_batch_size or len(samples)
        for epoch in range(self.config.algorithm.epochs):
            order = list(samples)
            random.Random(f"{self.config.seed} {step} {epoch}").shuffle(order)
            yield from (order[i : i + size] for i in range(0, len(order), size))


def has_advantage(sample: Sample) -> bool:
    """Anywhere where the off-policy correction leaves it a weight."""
    return bool((sample.advantages if sample.weights is None else sample.advantages * sample.weights).any())


class Results:
    """Sums over the updates of one role."""

    def __init__(self, role: str, loss: str):
        self.role = role
        self.loss = loss  # what its mean is called; with the KL and entropy terms, if there are any
        self.num_tried = 0
        self.updates: list[dict[str, float]] = []  # but for those that were skipped
        self.num_tokens = 0

    def add(self, result: dict[str, float], mini_batch: list[Sample]) -> None:
        self.updates.append(result)
        self.num_tokens += sum(int(sample.loss_mask.sum()) for sample in mini_batch)

    def means(self, per_update: dict[str, str], per_token: dict[str, str]) -> dict[str, float]:
        """name of the metric -> mean of a key of the results: 0 where nothing was to do, none where all was skipped."""
        if self.num_tried and not self.updates:
            return {}

        def sums(key: str) -> float:
            return sum(update[key] for update in self.updates)

        counts = [(per_update | {self.loss: "loss"}, len(self.updates)), (per_token, self.num_tokens)]
        return {name: sums(key) / max(count, 1) for keys, count in counts for name, key in keys.items()}
