"""The trainer's view of a Megatron role: one method per thing that all its ranks do together."""

import ray
import torch

from megarl.cluster.waiting import wait_all
from megarl.config import ActorConfig, ModelConfig, OptimizerConfig
from megarl.sample import Sample


class ActorGroup:
    """All ranks of the actor, in rank order. Every method raises RunError naming the rank that failed or was late."""

    def __init__(self, handles: list, call_timeout_s: float):
        self.handles = handles
        self.call_timeout_s = call_timeout_s
        self.places: list[dict] = []

    def start(self, model: ModelConfig, actor: ActorConfig, seed: int, timeout_s: float) -> None:
        """Load the model on all ranks; returns when every rank is ready."""
        (address, port), = wait_all({"actor rank 0": self.handles[0].address.remote()}, "starting the actor", timeout_s)
        arguments = (len(self.handles), address, port, model, actor, seed, self.call_timeout_s)
        self.places = wait_all(self._refs("start", *arguments), "loading the model", timeout_s)

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
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(log-probs, entropy) of each sample, [L] float32; no entropy of the reference."""
        merged = {}
        for result in self._all("logprobs", ray.put(samples), temperature, reference):
            merged |= result
        return [tuple(None if x is None else torch.tensor(x) for x in merged[i]) for i in range(len(samples))]

    def save(self, folder: str) -> None:
        self._all("save", folder)

    # Weight sync, one pipeline stage at a time

    def plan_buckets(self, bucket_bytes: int) -> list[list]:
        """For each pipeline stage its buckets, in sending order."""
        plans = self._all("plan_buckets", bucket_bytes)
        by_stage = {place["stage"]: plan for place, plan in zip(self.places, plans) if place["sends_weights"]}
        return [by_stage[stage] for stage in range(len(by_stage))]

    def sender_address(self, stage: int) -> tuple[str, int]:
        """(address, free port) of the rank that sends the stage."""
        sender = next(r for r in self._stage_ranks(stage) if self.places[r]["sends_weights"])
        refs = {f"actor rank {sender}": self.handles[sender].address.remote()}
        return wait_all(refs, "finding a port", self.call_timeout_s)[0]

    def start_join(self, stage: int, *arguments) -> dict[str, ray.ObjectRef]:
        return self._refs("join_weights_group", *arguments, ranks=self._stage_ranks(stage))

    def start_send(self, stage: int) -> dict[str, ray.ObjectRef]:
        return self._refs("send_weights", ranks=self._stage_ranks(stage))

    def _stage_ranks(self, stage: int) -> list[int]:
        """The ranks of the stage's first replica."""
        return [r for r, place in enumerate(self.places) if place["stage"] == stage and place["first_replica"]]

    def _refs(self, method: str, *arguments, ranks: list[int] | None = None) -> dict[str, ray.ObjectRef]:
        chosen = range(len(self.handles)) if ranks is None else ranks
        return {f"actor rank {rank}": getattr(self.handles[rank], method).remote(*arguments) for rank in chosen}

    def _all(self, method: str, *arguments) -> list:
        return wait_all(self._refs(method, *arguments), method, self.call_timeout_s)
