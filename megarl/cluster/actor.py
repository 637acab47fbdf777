"""The trainer's view of a Megatron role: one method per thing that all its ranks do together."""

import time

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from megarl.config import ActorConfig, ModelConfig, OptimizerConfig
from megarl.errors import ConfigError, RunError
from megarl.sample import Sample


class ActorGroup:
    """All ranks of the actor, in rank order. Every method raises RunError naming the rank that failed or was late."""

    def __init__(self, handles: list, call_timeout_s: float):
        self.handles = handles
        self.call_timeout_s = call_timeout_s
        self.places: list[dict] = []

    def start(self, model: ModelConfig, actor: ActorConfig, seed: int, timeout_s: float) -> None:
        """Load the model on all ranks; returns when every rank is ready."""
        address, port = self.wait([self.handles[0].address.remote()], "starting rank 0", timeout_s, ranks=[0])[0]
        arguments = (len(self.handles), address, port, model, actor, seed, timeout_s)
        self.places = self.wait([h.start.remote(*arguments) for h in self.handles], "loading the model", timeout_s)

    @property
    def backend(self) -> str:
        return self.places[0]["backend"]

    def use_optimizer(self, settings: OptimizerConfig) -> None:
        self._all("use_optimizer", settings)

    def capture_reference(self) -> None:
        self._all("capture_reference")

    def train_step(self, samples: list[Sample], loss, learning_rate: float, temperature: float) -> dict[str, float]:
        """One optimizer step; the sums over all replicas of what `Engine.train_step` returns, and `grad_norm`."""
        results = self._all("train_step", ray.put(samples), loss, learning_rate, temperature)
        sums: dict[str, float] = {}
        for result in results:
            for key, value in result.items():
                sums[key] = sums.get(key, 0.0) + value
        return sums | {"grad_norm": results[0]["grad_norm"]}

    def logprobs(
        self, samples: list[Sample], temperature: float, reference: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(log-probs, entropy) of each sample, [L] float32."""
        shared = ray.put(samples)
        refs = [handle.logprobs.remote(shared, temperature, reference) for handle in self.handles]
        merged = {}
        for result in self.wait(refs, "scoring log-probs", self.call_timeout_s):
            merged |= result
        return [tuple(torch.tensor(array) for array in merged[i]) for i in range(len(samples))]

    def save(self, folder: str) -> None:
        self.wait([h.save.remote(folder) for h in self.handles], f"saving {folder}", self.call_timeout_s)

    # Weight sync, one pipeline stage at a time

    def plan_buckets(self, bucket_bytes: int) -> list[list]:
        """For each pipeline stage its buckets, in sending order."""
        plans = self.wait([h.plan_buckets.remote(bucket_bytes) for h in self.handles], "planning buckets", self.call_timeout_s)
        by_stage = {place["stage"]: plan for place, plan in zip(self.places, plans) if place["sends_weights"]}
        return [by_stage[stage] for stage in range(len(by_stage))]

    def sender_address(self, stage: int) -> tuple[str, int]:
        sender = next(r for r, place in enumerate(self.places) if place["stage"] == stage and place["sends_weights"])
        return self.wait([self.handles[sender].address.remote()], "finding a port", self.call_timeout_s, ranks=[sender])[0]

    def start_join(self, stage: int, *arguments) -> list:
        return [self.handles[r].join_weights_group.remote(*arguments) for r in self._stage_ranks(stage)]

    def start_send(self, stage: int) -> list:
        return [self.handles[r].send_weights.remote() for r in self._stage_ranks(stage)]

    def _stage_ranks(self, stage: int) -> list[int]:
        return [r for r, place in enumerate(self.places) if place["stage"] == stage and place["first_replica"]]

    # Calls

    def _all(self, method: str, *arguments) -> list:
        refs = [handle.call.remote(method, *arguments) for handle in self.handles]
        return self.wait(refs, method, self.call_timeout_s)

    def wait(self, refs: list, what: str, timeout_s: float, ranks: list[int] | None = None) -> list:
        """The results of one call per rank. The first rank to fail ends the wait: the others may hang in a collective."""
        deadline = time.monotonic() + timeout_s
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                late = [refs.index(ref) if ranks is None else ranks[refs.index(ref)] for ref in waiting]
                raise RunError(f"{what}: actor ranks {late} did not answer within {timeout_s:g} s")
            rank = refs.index(done[0]) if ranks is None else ranks[refs.index(done[0])]
            try:
                ray.get(done[0])
            except RayTaskError as error:
                cause = error.cause if isinstance(error.cause, BaseException) else error
                if isinstance(cause, ConfigError):
                    raise ConfigError(str(cause)) from None
                raise RunError(f"{what}: actor rank {rank} failed with {type(cause).__name__}: {cause}") from error
            except RayActorError as error:
                raise RunError(f"{what}: the process of actor rank {rank} died: {error}") from error
        return ray.get(refs)
