"""The trainer's view of a Megatron role: one method per thing that all its ranks do together."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.checkpoint.folder import FileRecord
from megarl.cluster.placement import Node
from megarl.cluster.waiting import raise_failed, wait_all, who_is_gone
from megarl.config import ModelConfig, OptimizerConfig, Phase, RoleConfig
from megarl.logs import log_end
from megarl.sample import Sample

ANSWER_S = 5.0  # after a failure: for a rank that is in no call to say so, and for Ray to notice a death
START_KEY, CALL_KEY = "cluster.start_timeout_s", "cluster.call_timeout_s"
LOG_S = 20.0  # to read a log on another node
NUM_LOGS = 4  # a message shows the ends of at most so many ranks' logs


class RoleGroup:
    """All ranks of a role, in rank order. Every method raises RunError naming the rank that failed or was late."""

    def __init__(self, name: str, handles: list, logs: list[Path], nodes: list[Node], call_timeout_s: float):
        """`logs`: the file that each rank prints to, on its node."""
        self.name = name
        self.handles = handles
        self.logs = logs
        self.nodes = nodes
        self.call_timeout_s = call_timeout_s
        self.places: list[dict] = []
        self._pulse: dict[str, ray.ObjectRef] = {}

    def visible_gpus(self, timeout_s: float) -> list[str]:
        """The GPU of each rank, as its CUDA_VISIBLE_DEVICES names it; may be called before `start`."""
        return wait_all(self._refs("visible_gpu"), f"starting the {self.name}", timeout_s, START_KEY)

    def start(
        self, model: ModelConfig, role: RoleConfig, head: str, trainable: bool, seed: int, timeout_s: float
    ) -> None:
        """Load the model on all ranks; returns when every rank is ready."""
        first = {f"{self.name} rank 0": self.handles[0].address.remote()}
        ((address, port),) = wait_all(first, f"starting the {self.name}", timeout_s, START_KEY)
        arguments = (len(self.handles), address, port, model, role, head, trainable, seed, self.call_timeout_s)
        self.places = wait_all(self._refs("start", *arguments), "loading the model", timeout_s, START_KEY)

    @property
    def backend(self) -> str:
        return self.places[0]["backend"]

    @property
    def live_paths(self) -> dict[str, str]:
        """What `megarl.engine.fused.live_paths` says on rank 0."""
        return self.places[0]["live_paths"]

    def deaths(self) -> list[str]:
        """A report for each rank that died, then for each that hangs; the ends of the first few ranks' logs."""
        ranks = self._refs("address")
        reports = []
        for name, how in who_is_gone(ranks, ANSWER_S).items():
            rank = list(ranks).index(name)
            log = f"log {self.logs[rank]} on node {self.nodes[rank].name}"
            if len(reports) < NUM_LOGS:
                log = self._log_end(rank)
            reports.append(f"{name} {how}; {log}")
        return reports

    def _log_end(self, rank: int) -> str:
        """Read where the rank was, if this machine does not see the file."""
        path, node = self.logs[rank], self.nodes[rank]
        if not path.exists():
            there = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            reading = ray.remote(log_end).options(num_cpus=0, scheduling_strategy=there).remote(path, node.name)
            with contextlib.suppress(RayError):  # the node is gone too; GetTimeoutError among them
                return ray.get(reading, timeout=LOG_S)
        return log_end(path, node.name)

    def raise_dead(self) -> None:
        """While the ranks have nothing to do: RunError if one has died since the last call."""
        raise_failed(self._pulse, f"waiting with the {self.name}")
        self._pulse = self._refs("address")

    def has_died(self) -> bool:
        """Whether one of the ranks is dead."""
        return any("died" in how for how in who_is_gone(self._refs("address"), ANSWER_S).values())

    def use_optimizer(self, settings: OptimizerConfig) -> None:
        self._all("use_optimizer", settings)

    def capture_reference(self, ema_decay: float | None = None) -> None:
        """`Engine.capture_reference` on all ranks."""
        self._all("capture_reference", ema_decay)

    def train_step(
        self,
        samples: list[Sample],
        loss,
        learning_rate: float,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        pairs: bool = False,
    ) -> dict[str, float]:
        """One optimizer step; what `Engine.train_step` returns, its sums over all replicas."""
        return self.start_train_step(samples, loss, learning_rate, temperature, entropy_gradient, pairs)()

    def start_train_step(self, samples: list[Sample], *arguments) -> Callable[[], dict[str, float]]:
        """The same, behind what the ranks do now; the returned function waits for it."""
        refs = self._refs("train_step", ray.put(samples), *arguments)

        def wait() -> dict[str, float]:
            results = wait_all(refs, "train_step", self.call_timeout_s, CALL_KEY)
            return _sums(results) | {key: results[0][key] for key in ("grad_norm", "skipped")}

        return wait

    def evaluate(self, samples: list[Sample], loss, pairs: bool = False) -> dict[str, float]:
        """The sums of `Engine.evaluate` over all replicas."""
        return _sums(self._all("evaluate", ray.put(samples), loss, pairs))

    def logprobs(
        self, samples: list[Sample], temperature: float, reference: bool = False
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """(log-probs, entropy) of each sample, [L] float32; no entropy of the reference."""
        return self.start_logprobs(samples, temperature, reference)()

    def start_logprobs(self, samples: list[Sample], temperature: float, reference: bool = False) -> Callable[[], list]:
        """The same, behind what the ranks do now; the returned function waits for it."""
        refs = self._refs("logprobs", ray.put(samples), temperature, reference)

        def wait() -> list[tuple[torch.Tensor, torch.Tensor | None]]:
            scored = _by_sample(wait_all(refs, "logprobs", self.call_timeout_s, CALL_KEY))
            return [tuple(None if x is None else torch.tensor(x) for x in arrays) for arrays in scored]

        return wait

    def values(self, samples: list[Sample]) -> list[torch.Tensor]:
        """The values of each sample, [L] float32, of a role with a value head."""
        return self.start_values(samples)()

    def start_values(self, samples: list[Sample]) -> Callable[[], list[torch.Tensor]]:
        """The same, behind what the ranks do now; the returned function waits for it."""
        refs = self._refs("values", ray.put(samples))

        def wait() -> list[torch.Tensor]:
            scored = _by_sample(wait_all(refs, "values", self.call_timeout_s, CALL_KEY))
            return [torch.tensor(values) for values in scored]

        return wait

    def place(self, phase: Phase) -> None:
        """`Engine.place` on all ranks."""
        self._all("place", phase)

    def used_bytes(self) -> int:
        """What is taken of the fullest of the role's GPUs by all that runs on it; 0 on CPU."""
        return max(self._all("used_bytes"))

    def start_save(self, folder: str, reference: bool) -> int:
        """Begin to write weights, optimizer and generators, and the reference if asked to, into a folder that is there;
        returns the bytes of it all, when the role may change again."""
        return sum(self._all("start_save", folder, reference))

    def has_written(self) -> bool:
        """Whether all ranks' files of the save that was started are written, or have failed."""
        return all(self._all("has_written"))

    def finish_save(self) -> dict[str, FileRecord]:
        """Wait for them; their records by name in the folder."""
        return {name: record for records in self._all("finish_save") for name, record in records.items()}

    def load(self, folder: str, reference: bool) -> bool:
        """What a save wrote, into an optimizer that has made no step; whether the random generators go on too."""
        return all(self._all("load", folder, reference))

    # Weight sync, one pipeline stage at a time

    def plan_buckets(self, bucket_bytes: int) -> list[list]:
        """For each pipeline stage its buckets, in sending order."""
        plans = self._all("plan_buckets", bucket_bytes)
        by_stage = {place["stage"]: plan for place, plan in zip(self.places, plans) if place["sends_weights"]}
        return [by_stage[stage] for stage in range(len(by_stage))]

    def sender_address(self, stage: int) -> tuple[str, int]:
        """(address, free port) of the rank that sends the stage."""
        sender = next(r for r in self._stage_ranks(stage) if self.places[r]["sends_weights"])
        refs = {f"{self.name} rank {sender}": self.handles[sender].address.remote()}
        return wait_all(refs, "finding a port", self.call_timeout_s, CALL_KEY)[0]

    def start_join(self, stage: int, *arguments) -> dict[str, ray.ObjectRef]:
        return self._refs("join_weights_group", *arguments, ranks=self._stage_ranks(stage))

    def start_send(self, stage: int, timeout_s: float) -> dict[str, ray.ObjectRef]:
        """`timeout_s` bounds each bucket."""
        return self._refs("send_weights", timeout_s, ranks=self._stage_ranks(stage))

    def start_share(
        self, stage: int, servers: dict[str, int], version: str | None, timeout_s: float
    ) -> dict[str, ray.ObjectRef]:
        """Hand the stage's buckets to servers (url -> number of ranks) on the same machine; `timeout_s` bounds each."""
        return self._refs("share_weights", servers, version, timeout_s, ranks=self._stage_ranks(stage))

    def _stage_ranks(self, stage: int) -> list[int]:
        """The ranks that help to send the stage."""
        return [r for r, place in enumerate(self.places) if place["stage"] == stage and place["helps_to_send"]]

    def _refs(self, method: str, *arguments, ranks: list[int] | None = None) -> dict[str, ray.ObjectRef]:
        chosen = range(len(self.handles)) if ranks is None else ranks
        return {f"{self.name} rank {rank}": getattr(self.handles[rank], method).remote(*arguments) for rank in chosen}

    def _all(self, method: str, *arguments) -> list:
        return wait_all(self._refs(method, *arguments), method, self.call_timeout_s, CALL_KEY)


def _sums(results: list[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for result in results:
        for key, value in result.items():
            sums[key] = sums.get(key, 0.0) + value
    return sums


def _by_sample(results: list[dict[int, object]]) -> list:
    """What the replicas return for their parts of the samples, in the order of the samples."""
    merged = {index: value for result in results for index, value in result.items()}
    return [merged[index] for index in range(len(merged))]
