"""A short supervised start through the actor's own engine, before RL: the usual remedy for all-zero rewards."""

import random

from megarl.algorithms.losses import sft_loss
from megarl.cluster.cluster import Cluster
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.skipped import SkippedUpdates, why_skipped
from megarl.sample import Sample
from megarl.schedule import learning_rate


def warm_start(
    actor: RoleGroup,
    samples: list[Sample],
    config: Config,
    cluster: Cluster,
    run: RunDirectory,
    console: Console,
    skipped: SkippedUpdates,
) -> None:
    settings = config.warm_start
    actor.use_optimizer(settings.optimizer)
    console.begin("warm start", settings.steps)
    batches = shuffled_batches(samples, settings.batch_size, settings.steps, config.seed)
    for step, batch in enumerate(batches, start=1):
        rate = learning_rate(settings.optimizer, step, settings.steps)
        cluster.check_servers()  # they start meanwhile
        result = actor.train_step(batch, sft_loss, rate)
        console.advance()
        if result["skipped"]:
            skipped.add(f"warm_start_{step:06d}", batch, why_skipped(result))
            continue
        metrics = {"loss": result["loss"], "grad_norm": result["grad_norm"]}
        run.log_metrics({"warm_start/step": step} | {f"warm_start/{name}": value for name, value in metrics.items()})
        if step % 100 == 0 or step == settings.steps:
            console.line(f"warm start {step}/{settings.steps}  loss {result['loss']:.4f}")


def shuffled_batches(samples: list[Sample], batch_size: int, num_batches: int, seed: int):
    """Epoch after epoch in a new order each, without dropping the rest of an epoch."""
    rng = random.Random(f"warm start {seed}")
    queue: list[Sample] = []
    for _ in range(num_batches):
        while len(queue) < batch_size:
            queue += rng.sample(samples, len(samples))
        yield queue[:batch_size]
        queue = queue[batch_size:]
