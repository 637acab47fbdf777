"""THE loop: generate -> reward -> score -> advantage -> update -> sync -> save."""

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from megarl.algorithms.kl_controller import KLController
from megarl.checkpoint.resume import Resume
from megarl.cluster.cluster import Cluster
from megarl.cluster.role import RoleGroup
from megarl.collect import Collector
from megarl.config import Config, Phase
from megarl.config_monitor import refuse_taken_port
from megarl.data import toy
from megarl.errors import RunError
from megarl.evaluation.estimators import validation_metrics
from megarl.evaluation.scoring import evaluate_samples
from megarl.generate_only import generate_only
from megarl.inputs import Inputs, SupervisedInputs
from megarl.interrupt import ignore_warnings
from megarl.machine import resolve_device
from megarl.monitor.console import Console
from megarl.monitor.guards import Alarm, Guards
from megarl.monitor.metrics import agreement_metrics, policy_metrics
from megarl.monitor.run_directory import RunDirectory
from megarl.monitor.skipped import SkippedUpdates, nonfinite_fields
from megarl.monitor.timing import timed
from megarl.prepare import prepare
from megarl.progress import Loop, Progress
from megarl.rewards.model import RewardModel
from megarl.rewards.scorer import Scorer
from megarl.rewards.self_test import why_constant
from megarl.rollout.fleet import Fleet
from megarl.rollout.replay import Recording, Replay, check_recordings, validation_name
from megarl.rollout.seeds import seeds_for
from megarl.rollout.teacher import Teacher
from megarl.sample import Sample
from megarl.supervised import SupervisedTrainer
from megarl.update import Updater
from megarl.warm_start import warm_start

# Mean difference of log-probs between trainer and server that two right implementations of one model stay below.
LOGPROB_DIFF_LIMIT = {"float32": 1e-4, "bfloat16": 0.05}
# stage of a step -> what (actor, critic) hold on their GPUs
PHASES: dict[str, tuple[Phase, Phase]] = {
    "generate": ("generate", "generate"),
    "score": ("score", "score"),
    "update": ("update", "update"),
    "update the critic": ("generate", "update"),  # on shared GPUs; then the Updater lets the actor take them
    "push": ("score", "generate"),
}


def train(config: Config, command: list[str], resume: Resume | None = None) -> Path:
    """Run the whole training, or what is left of it after a checkpoint, and return the run directory.

    Raises ConfigError before anything is started where data or model are wrong, RunError where the run cannot go on.
    """
    device = resolve_device(config)
    refuse_taken_port(config)
    if config.toy:
        toy.make(config.toy.folder, config.toy.seed)
    inputs = SupervisedInputs(config) if config.algorithm.is_supervised else Inputs(config)
    if resume:
        resume.set_place(inputs.stream, print)
    check_recordings(config, resume)
    ignore_warnings()
    with ExitStack() as stack:
        console = stack.enter_context(Console())
        run = stack.enter_context(RunDirectory(config, command, device, resume, console.line))
        if resume and resume.in_place and config.rollout.save:
            Recording(config.rollout.save).forget_after(resume.step)
        if config.debug.generate_only:
            console.line(f"megarl: run directory {run.path}, device {device}, nothing is trained")
            generate_only(stack, config, inputs, run, console, device)
            return run.path
        progress = Progress(config, run, inputs.tokenizer, console, resume)
        stack.callback(progress.saver.clear)
        console.line(f"megarl: run directory {run.path}, device {device}")
        cluster = stack.enter_context(Cluster(config, device, run.logs, run.run_id, console.line))
        stack.enter_context(run.sinks.watching(cluster.gpu_memory))
        skipped = SkippedUpdates(config.trainer.max_skipped_updates, run, console)
        trainer = SupervisedTrainer if config.algorithm.is_supervised else Trainer
        trainer.start(stack, config, inputs, run, console, cluster, skipped, progress).run_all()
        console.line(f"megarl: done; metrics, samples and checkpoints are in {run.path.resolve()}")
    return run.path


class Trainer(Loop):
    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        run: RunDirectory,
        console: Console,
        actor: RoleGroup,
        critic: RoleGroup | None,
        teacher: Teacher | None,
        fleet: Fleet | Replay,
        scorer: Scorer,
        skipped: SkippedUpdates,
        progress: Progress,
    ):
        self.config = config
        self.inputs = inputs
        self.run = run
        self.console = console
        self.actor = actor
        self.critic = critic
        self.teacher = teacher
        self.fleet = fleet
        self.scorer = scorer
        self.skipped = skipped
        self.progress = progress
        self.has_given_up = False
        self.collector = Collector(config, inputs, fleet, scorer)
        self.guards = Guards(config.guards)
        self.updater = Updater(config, actor, critic, console, skipped)
        algorithm = config.algorithm
        self.kl = KLController(algorithm.kl_coefficient, algorithm.kl_target, algorithm.kl_horizon)

    @classmethod
    def start(
        cls,
        stack: ExitStack,
        config: Config,
        inputs: Inputs,
        run: RunDirectory,
        console: Console,
        cluster: Cluster,
        skipped: SkippedUpdates,
        progress: Progress,
    ) -> "Trainer":
        """Start servers and roles, warm start or resume included; what has to be closed goes to `stack`."""
        resume = progress.resume
        cluster.start_servers()  # they import for half a minute: all at the same time
        scorer = stack.enter_context(Scorer(config.algorithm.reward, config.rewards, console.line, run.logs))
        ranks = [f"{role.world_size} {name} ranks" for name, role in config.roles.megatron.items()]
        servers = [f"{group.servers} {name.removeprefix('roles.')} servers" for name, group in config.servers.items()]
        console.line(f"starting {', '.join(ranks + servers)}")
        replay = config.rollout.replay
        fleet = Replay(Recording(replay)) if replay else Fleet(config, cluster, inputs, console.line)
        stack.enter_context(fleet)
        if config.placement == "colocated":
            fleet.connect()  # a server takes its share of what is free at its start: the actor comes after it
        actor, critic = cluster.start_role("actor"), None
        if config.roles.critic:
            actor.place("generate")  # the critic may need its GPUs
            critic = cluster.start_role("critic")
            critic.use_optimizer(config.roles.critic.optimizer)
            if resume and resume.has_role("critic"):
                critic.load(resume.role("critic"), reference=False)
            critic.place("generate")
            actor.place("update")
            fleet.watched.append(critic)
        if inputs.reward_tokens:
            scorer.model = RewardModel.start(stack, config, cluster, inputs.reward_tokens)
            fleet.watched += scorer.model.ranks
        console.live_paths(actor.live_paths)
        if config.debug.sync_checksum:
            fleet.attach(actor)  # before anything is trained: it compares with the model folder
        if inputs.warm_start and not resume:
            warm_start(actor, inputs.warm_start, config, cluster, run, console, skipped)
        if config.roles.reference.enabled:
            actor.capture_reference(config.roles.reference.ema_decay)
        actor.use_optimizer(config.roles.actor.optimizer)
        if resume and not actor.load(resume.role("actor"), resume.has_reference() and config.roles.reference.enabled):
            console.line("the actor's layout is another than the checkpoint's: its random generators begin anew")
        fleet.attach(actor)
        teacher = stack.enter_context(Teacher(config, cluster)) if config.roles.teacher else None
        if teacher:
            teacher.connect()
        trainer = cls(config, inputs, run, console, actor, critic, teacher, fleet, scorer, skipped, progress)
        if resume:
            trainer.load_state(resume)
        return trainer

    def run_all(self) -> None:
        progress, steps = self.progress, self.config.trainer.steps
        self.fleet.push(version=progress.step)  # a server never serves what it read from disk
        self.console.begin("steps", steps, progress.step)
        with progress.following(self, {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})):
            progress.validate(self.evaluate)
            for step in progress.steps():
                metrics = self.step(step)
                alarms = self.guards.check(metrics)
                self.run.log_metrics(metrics | {"guards/alarms": len(alarms)})
                self.console.step(metrics, steps)
                self.guard(alarms)
                if step == 1:
                    self.console.memory(metrics)
                progress.reached(step)
                progress.validate(self.evaluate)

    def step(self, step: int) -> dict[str, float]:
        """One iteration: samples of policy version `step - 1`, an update, and the push of version `step`."""
        algorithm, times = self.config.algorithm, {}
        start = time.perf_counter()
        self.place("generate", times)
        samples, generated, metrics = self.collector.next(step, times)
        self.run.log_samples(step, generated[: self.config.trainer.num_logged_samples])
        self.run.log_failed(step, self.collector.failed)
        if step == 1:
            self.check_constant(generated)
        memory = self.memory("generate")
        self.place("score", times)
        with timed(times, "logprob"):
            entropies = self.score(samples, version=step - 1)
        memory |= self.memory("score")
        self.progress.hold()
        if broken := nonfinite_fields(samples):
            self.skipped.add(f"step_{step:06d}", samples, f"{broken} log-probs or values of its samples are not finite")
        else:
            metrics |= policy_metrics(samples, entropies) | self.agreement(samples, version=step - 1)
            metrics |= prepare(samples, self.config, self.kl.coefficient)
            self.place("update", times)
            with timed(times, "update"):
                metrics |= self.updater.run(samples, step, self.kl.coefficient if algorithm.kl_in == "loss" else 0.0)
            memory |= self.memory("update")
            metrics |= self.adapt_kl(step, metrics, len(samples))
        self.refresh_reference(step, times)
        with timed(times, "save"):  # now: a push may send the weights to host memory
            self.progress.begin_if_due(step)
        self.place("push", times)
        with timed(times, "sync"):
            metrics |= self.fleet.push(version=step)
        metrics["skipped_updates"] = self.skipped.count
        metrics["rollout/restarts"] = self.fleet.restarts
        times["step"] = time.perf_counter() - start
        num_tokens = sum(len(sample.token_ids) for sample in generated)
        return {
            "step": step,
            **metrics,
            **memory,
            **{f"time/{name}_s": seconds for name, seconds in times.items()},
            "perf/num_tokens": num_tokens,
            "perf/tokens_per_s": num_tokens / times["step"],
        }

    def place(self, stage: str, times: dict[str, float]) -> None:
        """Hold on the GPUs of actor and critic what a stage needs, and in host memory the rest, as far as the config
        says; servers that share them leave first. A push gives the GPUs back to those."""
        if not self.offloads:
            return
        if stage == "update" and self.updater.in_turns:
            stage = "update the critic"
        roles = [(role, phase) for role, phase in zip((self.actor, self.critic), PHASES[stage]) if role]
        with timed(times, "offload"):
            if stage != "generate":
                self.fleet.make_room()
            for role, phase in sorted(roles, key=lambda placed: placed[1] != "generate"):  # who leaves goes first
                role.place(phase)

    @property
    def offloads(self) -> bool:
        offloads = [role.offload for role in self.config.roles.trained.values()]
        return self.config.placement == "colocated" or any(offload not in (None, "none") for offload in offloads)

    def memory(self, phase: Phase) -> dict[str, float]:
        """What is taken of the fullest of the actor's GPUs at the end of a phase, by everything."""
        if not self.offloads or (used := self.actor.used_bytes()) == 0:
            return {}
        return {f"memory/{phase}_gpu_gb": used / 1e9}

    def score(self, samples: list[Sample], version: int) -> list[torch.Tensor] | None:
        """Fill old_logprobs, and where there is a reference, a critic or a teacher, what they say; returns each
        sample's entropies, if the actor scored them. Roles work at the same time.

        The old policy is the one that sampled: of samples kept from an earlier version only the server knows it.
        """
        temperature = self.config.rollout.sampling.temperature
        wait_values = self.critic.start_values(samples) if self.critic else None
        wait_teacher = self.teacher.start_score(samples) if self.teacher else None
        entropies = None
        for sample in samples:
            sample.old_logprobs = sample.rollout_logprobs
        if self.config.algorithm.old_logprobs == "recompute":
            scored = self.actor.logprobs(samples, temperature)
            entropies = [entropy for _, entropy in scored]
            for sample, (logprobs, _) in zip(samples, scored):
                if sample.policy_version == (version, version):
                    sample.old_logprobs = logprobs
        if self.config.roles.reference.enabled:
            for sample, (logprobs, _) in zip(samples, self.actor.logprobs(samples, temperature, reference=True)):
                sample.ref_logprobs = logprobs
        if wait_values:
            for sample, values in zip(samples, wait_values()):
                sample.values = values
        if wait_teacher:
            wait_teacher()
        return entropies

    def agreement(self, samples: list[Sample], version: int) -> dict[str, float]:
        """Trainer against server. Samples of the present version are scored by the weights that generated them: there
        they must agree. Nothing where the trainer does not score."""
        if self.config.algorithm.old_logprobs == "rollout":
            return {}
        fresh = [sample for sample in samples if sample.policy_version == (version, version)]
        if not fresh:  # all groups were kept from the last step
            return {}
        metrics = agreement_metrics(fresh)
        self.check_agreement(metrics["rollout/logprob_diff_mean"])
        return metrics

    def check_agreement(self, difference: float) -> None:
        limit = self.config.rollout.logprob_diff_limit or LOGPROB_DIFF_LIMIT[self.config.model.dtype]
        if not difference <= limit:
            raise RunError(
                f"rollout/logprob_diff_mean is {difference:.3g}, above its limit {limit:g} "
                f"(rollout.logprob_diff_limit): trainer and server do not hold the same weights, or do not compute the "
                f"same model"
            )

    def adapt_kl(self, step: int, metrics: dict[str, float], num_samples: int) -> dict[str, float]:
        """Let the coefficient follow what the KL was; the coefficient that this step had."""
        algorithm = self.config.algorithm
        if algorithm.kl_coefficient == 0:
            return {}
        used = self.kl.coefficient
        if step > algorithm.critic_warmup_steps:
            self.kl.update(metrics["kl/ref"], num_samples)
        return {"kl/coefficient": used}

    def refresh_reference(self, step: int, times: dict[str, float]) -> None:
        settings = self.config.roles.reference
        if settings.refresh_every and step % settings.refresh_every == 0:
            with timed(times, "reference"):
                self.actor.capture_reference(settings.ema_decay)

    def check_constant(self, samples: list[Sample]) -> None:
        """Say why rewards that are all equal teach nothing, where those of the first step are."""
        why = why_constant(samples, self.config)
        if why and self.config.rewards.on_constant == "stop":
            raise RunError(f"rewards.on_constant: stop: {why}")
        if why:
            self.console.loud(why)

    def guard(self, alarms: list[Alarm]) -> None:
        """Show warnings, and stop the run where a guard is to."""
        for alarm in alarms:
            if alarm.action == "warn":
                self.console.line(f"warning: {alarm.text}")
        if stops := [alarm.text for alarm in alarms if alarm.action == "stop"]:
            raise RunError("\n".join(stops))

    def evaluate(self, step: int) -> dict[str, float]:
        """Responses to the held-out prompts and their rewards, parts summed up as they are, as `megarl eval` has them; {}
        where there are none."""
        prompts, evaluation = self.inputs.validation, self.config.evaluation
        if not prompts or not self.config.algorithm.reward:
            return {}
        self.place("generate", {})
        number, temperature = evaluation.samples_per_prompt, evaluation.temperature
        limit = evaluation.max_new_tokens or self.config.rollout.sampling.max_new_tokens
        seeds = seeds_for(self.config, step, prompts, number, self.inputs.vocab_size, temperature, limit)
        name, tokenizer = validation_name(step), self.inputs.tokenizer
        samples = self.fleet.generate(name, prompts, number, tokenizer, temperature, seeds, limit)
        result = evaluate_samples(name, samples, self.scorer, self.config)
        values = validation_metrics(result, evaluation.pass_at, evaluation.correct_above)
        if "reward_mean" not in values:
            raise RunError(f"validation after step {step}: no sample has a reward (rewards.on_error)")
        metrics = {"step": step, "validation/num_prompts": len(prompts)}
        metrics |= {f"validation/{name}": value for name, value in values.items()}
        self.run.log_metrics(metrics)
        mean, num_prompts = values["reward_mean"], len(prompts)
        self.guard(self.guards.check(metrics))
        self.console.line(f"validation after step {step}: mean reward {mean:.3f} on {num_prompts} held-out prompts")
        return metrics

    # What a checkpoint needs: see megarl.progress.Loop

    def state(self) -> dict:
        return {
            **self.collector.state_dict(),
            "kl": self.kl.state_dict(),
            "guards": self.guards.state_dict(),
            "skipped_updates": self.skipped.count,
        }

    def load_state(self, resume: Resume) -> None:
        state = resume.state
        self.collector.load_state_dict(state, resume.kept(self.inputs.stream, self.inputs.prompts, self.console.line))
        self.kl.load_state_dict(state["kl"])
        self.guards.load_state_dict(state["guards"])
        self.skipped.count = state["skipped_updates"]

    def kept_groups(self) -> list[list[Sample]]:
        return self.collector.kept

    def hold(self, role: RoleGroup) -> None:
        if not self.offloads:
            return
        if not self.has_given_up:
            self.fleet.make_room()
        if self.updater.in_turns:
            (self.actor if role is self.critic else self.critic).place("generate")
        role.place("update")

    def saved_after_push(self, step: int) -> None:
        if self.config.placement == "colocated":
            self.place("push", {})
            self.fleet.push(version=step)

    def give_up(self) -> None:
        self.has_given_up = True
        if self.config.placement == "colocated":
            self.fleet.stop()  # whatever they were in the middle of
