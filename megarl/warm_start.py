"""A short supervised start through the actor's own engine, before RL: the usual remedy for all-zero rewards."""

import random

from megarl.algorithms.losses import sft_loss
from megarl.cluster.actor import ActorGroup
from megarl.cluster.cluster import Cluster
from megarl.config import Config, OptimizerConfig, WarmStartConfig
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.sample import Sample


def warm_start(
    actor: ActorGroup, samples: list[Sample], config: Config, cluster: Cluster, run: RunDirectory, console: Console
) -> None:
    settings = config.warm_start
    optimizer = OptimizerConfig(learning_rate=settings.learning_rate, weight_decay=settings.weight_decay)
    actor.use_optimizer(optimizer)
    console.begin("warm start", settings.steps)
    batches = shuffled_batches(samples, settings.batch_size, settings.steps, config.seed)
    for step, batch in enumerate(batches, start=1):
        rate = settings.learning_rate * rate_factor(settings, step)
        cluster.check_servers()  # they start meanwhile
        result = actor.train_step(batch, sft_loss, rate, temperature=1.0)
        run.log_metrics({"warm_start/step": step, "warm_start/loss": result["loss"], "warm_start/grad_norm": result["grad_norm"]})
        console.advance()
        if step % 100 == 0 or step == settings.steps:
            console.line(f"warm start {step}/{settings.steps}  loss {result['loss']:.4f}")


def rate_factor(settings: WarmStartConfig, step: int) -> float:
    """Share of the peak rate at `step` (from 1): linear warm-up, constant, then linear decay to `final_fraction`."""
    warmup = min(1.0, step / settings.warmup_steps) if settings.warmup_steps else 1.0
    decay_start = settings.decay_from * settings.steps
    progress = max(0.0, (step - decay_start) / max(1.0, settings.steps - decay_start))
    return warmup * (1.0 - progress * (1.0 - settings.final_fraction))


def shuffled_batches(samples: list[Sample], batch_size: int, num_batches: int, seed: int):
    """Epoch after epoch in a new order each, without dropping the rest of an epoch."""
    rng = random.Random(f"warm start {seed}")
    queue: list[Sample] = []
    for _ in range(num_batches):
        while len(queue) < batch_size:
            queue += rng.sample(samples, len(samples))
        yield queue[:batch_size]
        queue = queue[batch_size:]
