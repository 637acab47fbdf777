"""The loop of the algorithms that learn from responses that are there: sft, dpo, ipo and reward_model. No servers."""

import math
import time
from contextlib import ExitStack
from functools import partial

from megarl.algorithms.losses import sft_loss
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.cluster.cluster import Cluster
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.errors import RunError
from megarl.inputs import SupervisedInputs
from megarl.monitor.console import Console
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.skipped import SkippedUpdates, why_skipped
from megarl.prepare import keywords_of
from megarl.presets import WITH_REFERENCE
from megarl.progress import Loop, Progress
from megarl.sample import Sample
from megarl.schedule import learning_rate

PER_TOKEN = ("nll",)  # metrics of the losses that are sums over trained tokens; the others are sums over pairs


class SupervisedTrainer(Loop):
    def __init__(
        self,
        config: Config,
        inputs: SupervisedInputs,
        run: RunDirectory,
        console: Console,
        actor: RoleGroup,
        skipped: SkippedUpdates,
        progress: Progress,
    ):
        self.config = config
        self.run = run
        self.console = console
        self.actor = actor
        self.skipped = skipped
        self.progress = progress
        self.rows = inputs.stream
        self.validation = sum(inputs.validation, [])
        algorithm = config.algorithm
        self.name, self.pairs = algorithm.name, algorithm.has_pairs
        function = PREFERENCE_LOSSES[self.name] if self.pairs else sft_loss
        self.loss = partial(function, **keywords_of(function, algorithm, algorithm.preference))

    @classmethod
    def start(
        cls,
        stack: ExitStack,
        config: Config,
        inputs: SupervisedInputs,
        run: RunDirectory,
        console: Console,
        cluster: Cluster,
        skipped: SkippedUpdates,
        progress: Progress,
    ) -> "SupervisedTrainer":
        """Start the actor, from a checkpoint where the run goes on; nothing has to be closed."""
        console.line(f"starting {config.roles.actor.world_size} actor ranks")
        actor = cluster.start_role("actor", head="value" if config.algorithm.name == "reward_model" else "lm")
        console.live_paths(actor.live_paths)
        if config.algorithm.name in WITH_REFERENCE:
            actor.capture_reference()
        actor.use_optimizer(config.roles.actor.optimizer)
        trainer = cls(config, inputs, run, console, actor, skipped, progress)
        if resume := progress.resume:
            actor.load(resume.role("actor"), reference=False)
            skipped.count = resume.state["skipped_updates"]
        return trainer

    def run_all(self) -> None:
        progress, steps = self.progress, self.config.trainer.steps
        self.console.begin("steps", steps, progress.step)
        with progress.following(self, {"actor": self.actor}):
            progress.validate(self.evaluate)
            for step in progress.steps():
                metrics = self.step(step)
                self.run.log_metrics(metrics)
                self.console.step(metrics, steps)
                progress.begin_if_due(step)
                progress.reached(step)
                progress.validate(self.evaluate)

    def step(self, step: int) -> dict[str, float]:
        """`prompts_per_step` rows, in mini-batches."""
        start = time.perf_counter()
        samples = sum(self.rows.next(self.config.algorithm.prompts_per_step), [])
        self.score_reference(samples)
        self.progress.hold()
        rate = learning_rate(self.config.roles.actor.optimizer, step, self.config.trainer.steps)
        size = self.config.algorithm.mini_batch_size or len(samples)
        results, trained = [], []
        for mini_batch in (samples[i : i + size] for i in range(0, len(samples), size)):
            result = self.actor.train_step(mini_batch, self.loss, rate, pairs=self.pairs)
            if result["skipped"]:
                self.skipped.add(f"step_{step:06d}", mini_batch, why_skipped(result))
                continue
            results.append(result)
            trained += mini_batch
        metrics = {}
        if results:
            sums = {key: sum(result[key] for result in results) for key in results[0]}
            metrics = self.means(sums, trained, len(results)) | {"grad_norm": sums["grad_norm"] / len(results)}
        seconds = time.perf_counter() - start
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        return {
            "step": step,
            **metrics,
            "learning_rate": rate,
            "skipped_updates": self.skipped.count,
            "time/step_s": seconds,
            "perf/num_tokens": num_tokens,
            "perf/tokens_per_s": num_tokens / seconds,
        }

    def score_reference(self, samples: list[Sample]) -> None:
        """Fill ref_logprobs where the loss has a reference: once, as it stays as it is."""
        new = [sample for sample in samples if sample.ref_logprobs is None]
        if self.name in WITH_REFERENCE and new:
            for sample, (logprobs, _) in zip(new, self.actor.logprobs(new, 1.0, reference=True)):
                sample.ref_logprobs = logprobs

    def evaluate(self, step: int) -> dict[str, float]:
        """The loss and its metrics on the held-out rows; {} where there are none. RunError where a number is not
        finite."""
        if not self.validation:
            return {}
        self.score_reference(self.validation)
        sums = self.actor.evaluate(self.validation, self.loss, pairs=self.pairs)
        broken = int(sums["nonfinite_logprobs"])
        if broken or not math.isfinite(sums["loss"]):
            what = "values" if self.name == "reward_model" else "log-probs"
            text = f"{broken} {what} are not finite, the loss is {sums['loss']:g}"
            raise RunError(f"validation after step {step}: {text}")
        metrics = {f"validation/{name}": value for name, value in self.means(sums, self.validation, 1).items()}
        self.run.log_metrics({"step": step, **metrics})
        shown = ", ".join(f"{name.rpartition('/')[2]} {value:.4f}" for name, value in metrics.items())
        self.console.line(f"validation after step {step}: {shown}")
        return metrics

    def state(self) -> dict:
        return {"data": self.rows.state_dict(), "skipped_updates": self.skipped.count}

    def means(self, sums: dict[str, float], samples: list[Sample], num_updates: int) -> dict[str, float]:
        """Of the sums over some updates, all their samples together: name/loss and name/METRIC."""
        num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
        means = {"loss": sums["loss"] / num_updates}
        for key, value in sums.items():
            if key not in ("loss", "grad_norm", "skipped", "nonfinite_logprobs"):
                means[key] = value / max(num_tokens if key in PER_TOKEN else len(samples) // 2, 1)
        return {f"{self.name}/{key}": value for key, value in means.items()}
