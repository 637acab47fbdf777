"""THE loop: generate -> reward -> score -> advantage -> update -> sync -> save."""

import inspect
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.losses import policy_loss
from megarl.algorithms.off_policy import correction
from megarl.cluster.cluster import Cluster
from megarl.cluster.role import RoleGroup
from megarl.config import AlgorithmConfig, Config, Phase
from megarl.data import toy
from megarl.data.chat import load_tokenizer
from megarl.data.dataset import PromptStream, check_enough, load_prompts, load_warm_start
from megarl.engine.hf.shape import ModelShape
from megarl.errors import RunError
from megarl.machine import resolve_device
from megarl.monitor.console import Console
from megarl.monitor.metrics import logprob_metrics, sample_metrics
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.skipped import SkippedUpdates, nonfinite_logprobs, why_skipped
from megarl.rewards import REWARDS, score
from megarl.rollout.fleet import Fleet
from megarl.sample import Prompt, Sample
from megarl.schedule import learning_rate
from megarl.warm_start import warm_start

# Mean difference of log-probs between trainer and server that two right implementations of one model stay below.
LOGPROB_DIFF_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}


def train(config: Config, command: list[str]) -> Path:
    """Run the whole training and return the run directory.

    Raises ConfigError before anything is started where data or model are wrong, RunError where the run cannot go on.
    """
    device = resolve_device(config)
    if config.toy:
        toy.make(config.toy.folder, config.toy.seed)
    inputs = Inputs(config)
    with ExitStack() as stack:
        console = stack.enter_context(Console())
        run = RunDirectory(config, command, device)
        stack.callback(run.close)
        console.line(f"megarl: run directory {run.path}, device {device}")
        cluster = stack.enter_context(Cluster(config, device, run.logs, run.run_id, console.line))
        cluster.start_servers()  # they import for half a minute: all at the same time
        console.line(f"starting {config.roles.actor.world_size} actor ranks and {config.rollout.servers} rollout servers")
        fleet = stack.enter_context(Fleet(config, cluster, inputs, console.line))
        if config.placement == "colocated":
            fleet.connect()  # a server takes its share of what is free at its start: the actor comes after it
        actor = cluster.start_role("actor")
        for what, how in actor.live_paths.items():
            console.line(f"  {what + ':':18} {how}")
        if config.debug.sync_checksum:
            fleet.attach(actor)  # before anything is trained: it compares with the model folder
        skipped = SkippedUpdates(config.trainer.max_skipped_updates, run, console)
        if inputs.warm_start:
            warm_start(actor, inputs.warm_start, config, cluster, run, console, skipped)
        if config.roles.reference.enabled:
            actor.capture_reference()
        actor.use_optimizer(config.roles.actor.optimizer)
        fleet.attach(actor)
        Trainer(config, inputs, run, console, actor, fleet, skipped).run_all()
        console.line(f"megarl: done; metrics, samples and checkpoints are in {run.path.resolve()}")
    return run.path


class Inputs:
    """Tokenizer and data, read and checked before anything is started."""

    def __init__(self, config: Config):
        shape = ModelShape.read(config.model.path)
        self.context_length, self.vocab_size = shape.max_positions, shape.vocab_size
        self.tokenizer = load_tokenizer(config.model.path)
        self.prompts = load_prompts(config.data.train, config.data, self.tokenizer, self.context_length)
        check_enough(self.prompts, config.algorithm.prompts_per_step, config.data.train)
        self.validation: list[Prompt] = []
        if config.data.validation:
            prompts = load_prompts(config.data.validation, config.data, self.tokenizer, self.context_length)
            self.validation = prompts[: config.trainer.evaluate_prompts]
        self.warm_start: list[Sample] = []
        if config.warm_start.data:
            self.warm_start = load_warm_start(config.warm_start.data, config.data, self.tokenizer, self.context_length)


class Trainer:
    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        run: RunDirectory,
        console: Console,
        actor: RoleGroup,
        fleet: Fleet,
        skipped: SkippedUpdates,
    ):
        self.config = config
        self.inputs = inputs
        self.run = run
        self.console = console
        self.actor = actor
        self.fleet = fleet
        self.skipped = skipped
        self.prompts = PromptStream(inputs.prompts, config.seed)
        self.reward = REWARDS[config.algorithm.reward]
        self.loss = partial(
            policy_loss,
            clip_low=config.algorithm.clip_low,
            clip_high=config.algorithm.clip_high,
            loss_aggregation=config.algorithm.loss_aggregation,
            kl_coefficient=config.algorithm.kl_coefficient,
            entropy_coefficient=config.algorithm.entropy_coefficient,
            kind=config.algorithm.policy_loss,
            dual_clip=config.algorithm.dual_clip,
            kl_estimator=config.algorithm.kl_estimator,
            kl_importance_weighted=config.algorithm.kl_importance_weighted,
            aggregation_length=config.algorithm.aggregation_length or config.rollout.sampling.max_new_tokens,
        )

    def run_all(self) -> None:
        steps = self.config.trainer.steps
        self.fleet.push(version=0)  # a server never serves what it read from disk
        self.evaluate(step=0)
        self.console.begin("steps", steps)
        for step in range(1, steps + 1):
            with self.saving_on_interrupt(step):
                metrics = self.step(step)
                self.run.log_metrics(metrics)
                self.console.step(metrics, steps)
                if step == 1:
                    self.console.memory(metrics)
                if self.is_due(step, self.config.trainer.evaluate_every):
                    self.evaluate(step)

    def step(self, step: int) -> dict[str, float]:
        """One iteration: samples of policy version `step - 1`, an update, and the push of version `step`."""
        algorithm, temperature = self.config.algorithm, self.config.rollout.sampling.temperature
        times: dict[str, float] = {}
        start = time.perf_counter()
        self.place("generate", times)
        with timed(times, "generate"):
            samples = self.generate(self.prompts.next(algorithm.prompts_per_step), version=step - 1)
        memory = self.memory("generate")
        with timed(times, "reward"):
            score(samples, self.reward)
            if self.config.debug.shuffle_rewards:
                shuffle_rewards(samples, self.config.seed, step)
        self.place("score", times)
        with timed(times, "logprob"):
            entropies = self.score_logprobs(samples, temperature)
        memory |= self.memory("score")
        ADVANTAGES[algorithm.name](samples, **keywords_of(ADVANTAGES[algorithm.name], algorithm))
        metrics = sample_metrics(samples, algorithm.group_size)
        if broken := nonfinite_logprobs(samples):
            self.skipped.add(f"step_{step:06d}", samples, f"{broken} log-probs of its samples are not finite")
        else:
            metrics |= logprob_metrics(samples, entropies) | self.correct(samples)
            self.check_agreement(metrics["rollout/logprob_diff_mean"])
            self.place("update", times)
            with timed(times, "update"):
                metrics |= self.update(samples, step, temperature)
            memory |= self.memory("update")
        if self.is_due(step, self.config.trainer.save_every):
            with timed(times, "save"):  # now: a push may send the weights to host memory
                self.save(f"step_{step:06d}")
        self.place("score", times)
        with timed(times, "sync"):
            metrics |= self.fleet.push(version=step)
        metrics["skipped_updates"] = self.skipped.count
        metrics["rollout/restarts"] = self.fleet.restarts
        times["step"] = time.perf_counter() - start
        self.run.log_samples(step, samples[: self.config.trainer.num_logged_samples])
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        return {
            "step": step,
            **metrics,
            **memory,
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "perf/tokens_per_s": num_tokens / times["step"],
        }

    def place(self, phase: Phase, times: dict[str, float]) -> None:
        """Hold on the actor's GPUs what `phase` needs, and in host memory the rest, as far as the config says; servers that
        share them leave first. A push gives the GPUs back to those."""
        if not self.shares_memory:
            return
        with timed(times, "offload"):
            if phase != "generate":
                self.fleet.make_room()
            self.actor.place(phase)

    @property
    def shares_memory(self) -> bool:
        return self.config.placement == "colocated" or self.config.roles.actor.offload not in (None, "none")

    def memory(self, phase: Phase) -> dict[str, float]:
        """What is taken of the fullest of the actor's GPUs at the end of a phase, by everything."""
        if not self.shares_memory or (used := self.actor.used_bytes()) == 0:
            return {}
        return {f"memory/{phase}_gpu_gb": used / 1e9}

    def generate(self, prompts: list[Prompt], version: int) -> list[Sample]:
        samples = self.fleet.generate(prompts, self.config.algorithm.group_size, self.inputs.tokenizer)
        stale = {sample.policy_version for sample in samples} - {(version, version)}
        if stale:
            raise RunError(f"samples of policy versions {sorted(stale)} where all should be of version {version}")
        return samples

    def score_logprobs(self, samples: list[Sample], temperature: float):
        """Fill old_logprobs and, with a reference, ref_logprobs; returns each sample's entropies."""
        scored = self.actor.logprobs(samples, temperature)
        for sample, (logprobs, _) in zip(samples, scored):
            sample.old_logprobs = logprobs
        if self.config.roles.reference.enabled:
            for sample, (logprobs, _) in zip(samples, self.actor.logprobs(samples, temperature, reference=True)):
                sample.ref_logprobs = logprobs
        return [entropy for _, entropy in scored]

    def correct(self, samples: list[Sample]) -> dict[str, float]:
        """Fill .weights as algorithm.off_policy says; metrics of it."""
        settings = self.config.algorithm.off_policy
        if settings is None:
            return {}
        weights, metrics = correction(samples, settings.kind, settings.low, settings.high, settings.veto)
        for sample, weights_L in zip(samples, weights):
            sample.weights = weights_L
        return {f"off_policy/{name}": value for name, value in metrics.items()}

    def update(self, samples: list[Sample], step: int, temperature: float) -> dict[str, float]:
        """All optimizer steps of an iteration. A mini-batch with neither an advantage nor a KL or entropy term has nothing
        to teach: for it the weights and the optimizer's state stay as they are, weight decay and momentum included."""
        algorithm = self.config.algorithm
        size = algorithm.mini_batch_size or len(samples)
        order = list(samples)
        random.Random(f"{self.config.seed} {samples[0].policy_version}").shuffle(order)
        mini_batches = [order[i : i + size] for i in range(0, len(order), size)]
        if algorithm.kl_coefficient == algorithm.entropy_coefficient == 0:
            mini_batches = [batch for batch in mini_batches if any(sample.advantages.any() for sample in batch)]
        if not mini_batches:
            self.console.line("warning: the rewards of every group are equal, so this step changes nothing")
        rate = learning_rate(self.config.roles.actor.optimizer, step, self.config.trainer.steps)
        results, num_tokens = [], 0
        for mini_batch in mini_batches:
            result = self.actor.train_step(mini_batch, self.loss, rate, temperature, algorithm.entropy_coefficient > 0)
            if result["skipped"]:
                self.skipped.add(f"step_{step:06d}", mini_batch, why_skipped(result))
                continue
            results.append(result)
            num_tokens += sum(int(sample.loss_mask.sum()) for sample in mini_batch)
        if mini_batches and not results:
            return {"learning_rate": rate}

        def mean(key: str, count: int) -> float:
            return sum(result[key] for result in results) / max(count, 1)

        return {
            "loss/policy": mean("loss", len(results)),  # with the KL and entropy terms, if there are any
            "grad_norm": mean("grad_norm", len(results)),
            "learning_rate": rate,
            "clip/ratio": mean("clipped", num_tokens),
            "kl/old": mean("kl_old", num_tokens),
        }

    def check_agreement(self, difference: float) -> None:
        """The samples are scored by the weights that generated them: trainer and server must agree."""
        limit = self.config.rollout.logprob_diff_limit or LOGPROB_DIFF_LIMIT[self.config.model.dtype]
        if not difference <= limit:
            raise RunError(
                f"rollout/logprob_diff_mean is {difference:.3g}, above its limit {limit:g} (rollout.logprob_diff_limit): "
                f"trainer and server do not hold the same weights, or do not compute the same model"
            )

    def evaluate(self, step: int) -> None:
        """Mean reward of greedy responses to the held-out prompts."""
        if not self.inputs.validation:
            return
        self.place("generate", {})
        samples = self.fleet.generate(self.inputs.validation, 1, self.inputs.tokenizer, temperature=0.0)
        score(samples, self.reward)
        mean = sum(sample.reward for sample in samples) / len(samples)
        self.run.log_metrics({"step": step, "validation/reward_mean": mean, "validation/num_prompts": len(samples)})
        self.console.line(f"validation after step {step}: mean reward {mean:.3f} on {len(samples)} held-out prompts")

    def is_due(self, step: int, every: int) -> bool:
        return step == self.config.trainer.steps or (every > 0 and step % every == 0)

    def save(self, name: str) -> None:
        self.actor.place("score")
        folder = self.run.checkpoint(name)
        self.actor.save(str(folder.resolve()))
        self.console.line(f"checkpoint {folder}")

    @contextmanager
    def saving_on_interrupt(self, step: int):
        """After Ctrl-C or SIGTERM the weights as they are, if the config says so; a second one ends that too."""
        try:
            yield
        except KeyboardInterrupt:
            if self.config.trainer.save_on_interrupt:
                self.console.line(f"interrupted in step {step}: saving; once more to end at once")
                self.fleet.stop()  # whatever they were in the middle of
                self.save(f"interrupted_{step:06d}")
            raise


def keywords_of(function: Callable, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The config keys that are parameters of `function`."""
    return {name: getattr(algorithm, name) for name in inspect.signature(function).parameters if hasattr(algorithm, name)}


def shuffle_rewards(samples: list[Sample], seed: int, step: int) -> None:
    rewards = [sample.reward for sample in samples]
    random.Random(f"{seed} {step}").shuffle(rewards)
    for sample, reward in zip(samples, rewards):
        sample.reward = reward


@contextmanager
def timed(times: dict[str, float], name: str):
    """Adds to `times[name]`."""
    start = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - start
