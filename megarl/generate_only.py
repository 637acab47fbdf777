"""Generation without training: the samples of each step, by the weights in model.path, into a folder."""

from contextlib import ExitStack

from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import SERVER
from megarl.collect import Collector
from megarl.config import Config
from megarl.inputs import Inputs
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.rewards.model import RewardModel
from megarl.rewards.scorer import Scorer
from megarl.rollout.fleet import Fleet


def generate_only(
    stack: ExitStack, config: Config, inputs: Inputs, run: RunDirectory, console: Console, device: str
) -> None:
    """All steps' rounds: generated, scored, logged as a training would, and kept by rollout.save."""
    tokens = inputs.reward_tokens
    parts = {SERVER, tokens.part} if tokens else {SERVER}
    alone = config.model_copy(update={"placement": "disaggregated"})
    cluster = stack.enter_context(Cluster(alone, device, run.logs, run.run_id, console.line, parts=parts))
    stack.enter_context(run.sinks.watching(cluster.gpu_memory))
    cluster.start_servers()
    scorer = stack.enter_context(Scorer(config.algorithm.reward, config.rewards, console.line, run.logs))
    fleet = stack.enter_context(Fleet(alone, cluster, inputs, console.line))
    fleet.connect()
    if tokens:
        scorer.model = RewardModel.start(stack, config, cluster, tokens)
        fleet.watched += scorer.model.ranks
    collector = Collector(config, inputs, fleet, scorer)
    console.begin("steps", config.trainer.steps)
    for step in range(1, config.trainer.steps + 1):
        times: dict[str, float] = {}
        _, generated, metrics = collector.next(step, times)
        run.log_samples(step, generated[: config.trainer.num_logged_samples])
        run.log_failed(step, collector.failed)
        metrics |= {f"time/{name}_s": seconds for name, seconds in times.items()}
        num_tokens = sum(len(sample.token_ids) for sample in generated)
        run.log_metrics({"step": step, **metrics, "perf/num_tokens": num_tokens})
        console.advance()
    console.line(f"megarl: the samples of {config.trainer.steps} steps are in {config.rollout.save}")
