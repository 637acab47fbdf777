"""The rollout servers as the trainer sees them: they generate, take weights, and one that dies is started again."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megarl.cluster.cluster import Cluster
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.errors import RunError
from megarl.rollout import checksum
from megarl.rollout.canary import DIFF_LIMIT, Canary
from megarl.rollout.client import RolloutClient
from megarl.rollout.replay import Recording
from megarl.rollout.sync import BroadcastSync, ColocatedSync, SyncFailed, WeightSync
from megarl.sample import Prompt, Sample

if TYPE_CHECKING:
    from megarl.inputs import Inputs


class Fleet:
    """A server that was started again serves from the next push on, so never with other weights than the present ones.

    Use as a context: `connect` waits for the servers that the cluster has started, `attach` ties them to the actor.
    """

    def __init__(self, config: Config, cluster: Cluster, inputs: "Inputs", report: Callable[[str], None]):
        """`report` gets a line for each restart."""
        self.config = config
        self.cluster = cluster
        self.inputs = inputs
        self.report = report
        self.client: RolloutClient | None = None
        self.sync: WeightSync | None = None
        self.watched: list[RoleGroup] = []  # roles that nobody else looks at while the servers generate
        self.version = -1  # of what the servers read from disk
        self.restarts = 0
        self._urls: list[str] = []  # by index
        self._starting: dict[int, Any] = {}  # index -> what its start will return
        self._on_disk: dict[str, dict[str, str]] = {}  # checksums

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exception) -> None:
        if self.client is not None:
            self.client.close()

    def connect(self) -> None:
        """Wait for the servers; those that are to share the actor's GPUs leave them at once."""
        rollout = self.config.rollout
        self._urls = self.cluster.wait_servers()
        self.client = RolloutClient.of(
            rollout,
            self._urls,
            stop_token_ids=[self.inputs.tokenizer.eos_token_id],
            context_length=self.inputs.context_length,
            gate_timeout_s=rollout.request_timeout_s + (1 + rollout.max_restarts) * rollout.start_timeout_s,
        )
        if self.config.debug.sync_checksum:
            self._on_disk = self.client.checksums(checksum.TIMEOUT_S)
        if self.config.placement == "colocated":
            self.client.leave_gpus(self.config.sync.timeout_s)

    def attach(self, actor: RoleGroup) -> None:
        """Make ready to push this actor's weights; nothing the second time. With debug.sync_checksum a first push shows
        that it brings what the servers read from the model folder, as the actor did."""
        if self.sync is not None:
            return
        if self.client is None:
            self.connect()
        config, inputs = self.config, self.inputs
        limit = config.sync.canary_diff_limit or DIFF_LIMIT[config.model.dtype]
        canary = Canary(actor, self.client, inputs.vocab_size, inputs.context_length, limit)
        placement = ColocatedSync if config.placement == "colocated" else BroadcastSync
        self.watched.append(actor)
        self.sync = placement(actor, self.client, config.rollout.tensor_parallel, config.sync, canary)
        if config.debug.sync_checksum:
            self.push(version=0)
            checksum.compare(self.client, self._on_disk, "reading the model folder")
            self.make_room()
            actor.place("update")  # as it was

    def generate(
        self,
        name: str,
        prompts: list[Prompt],
        group_size: int,
        tokenizer,
        temperature: float | None = None,
        seeds: list[list[int]] | None = None,
        max_new_tokens: int | None = None,
    ) -> list[Sample]:
        """As the client's; a dead server's requests are made again elsewhere, or by its successor if it was alone.
        `name`: of what is generated, by which rollout.save keeps it."""
        more = (temperature, self._tend, seeds, max_new_tokens)
        samples = self.client.generate(prompts, group_size, tokenizer, *more)
        if self.config.rollout.save is not None:
            Recording(self.config.rollout.save).save(name, samples)
        return samples

    def push(self, version: int) -> dict[str, float]:
        """As `WeightSync.push`, once more where a server died or hangs in it: after that one was started again, without
        the others waiting for it."""
        self.version = version
        self.client.close_gate()
        self._restart_dead()
        metrics = self._push(version)
        if self.config.debug.sync_checksum:
            checksum.verify(self.client, lambda: self._push(version), f"the push of version {version}")
        return metrics

    def _push(self, version: int) -> dict[str, float]:
        while True:
            self._admit(wait=not self.client.urls or self.sync.in_turns)
            try:
                return self.sync.push(version)
            except SyncFailed as failure:
                self._recover(failure)

    def make_room(self) -> None:
        """Before the actor works, where servers share its GPUs: have them leave, those too that are just starting."""
        while self.sync.in_turns:
            self.client.close_gate()
            self._restart_dead()
            self._admit(wait=True)
            try:
                return self.sync.make_room()
            except RunError as failure:
                self._recover(failure)

    def stop(self) -> None:
        """End all servers for good."""
        self.client.close_gate()
        self.cluster.stop_servers()

    def _recover(self, failure: RunError) -> None:
        """Start the servers again that a failure shows to be dead or to hang; raise it where it shows none, or a dead
        rank of the actor. Servers that share GPUs are all started again: who of them holds what is not known."""
        if self.sync.actor.has_died():
            raise failure
        silent = self.client.silent(paused=self.sync.in_turns)
        if not silent:
            raise failure
        self.sync.leave_gpus()
        for i, url in enumerate(self.client.urls if self.sync.in_turns else silent):
            self._restart(url, str(failure), counts=i == 0)  # they hang in one broadcast: one incident

    def _tend(self) -> None:
        """While requests run: start dead servers again, and bring them back at once where none is left. Raises RunError
        where a rank of the watched roles has died."""
        for role in self.watched:
            role.raise_dead()
        self._restart_dead()
        if not self.client.urls:
            self.push(self.version)
            self.sync.actor.place("generate")  # as it was

    def _restart_dead(self) -> None:
        for url, why in self.client.take_dead().items():
            self._restart(url, why)

    def _restart(self, url: str, why: str, counts: bool = True) -> None:
        index = self._urls.index(url)
        name = f"rollout server {index} ({url})"
        limit = self.config.rollout.max_restarts
        if counts and self.restarts == limit:
            raise RunError(f"{name} is gone, after {limit} restarts (rollout.max_restarts={limit}): {why}")
        self.restarts += counts
        self.report(f"warning: {name} is gone and is started again ({self.restarts} of {limit}): {why}")
        self.client.remove(url)
        self.sync.forget_servers()
        self._starting[index] = self.cluster.restart_server(index)

    def _admit(self, wait: bool) -> None:
        """Give the client the restarted servers that are ready; with `wait` all of them."""
        for index in list(self._starting):
            if wait or self.cluster.has_started(self._starting[index]):
                self._urls[index] = self.cluster.wait_server(index, self._starting.pop(index))
                self.client.admit([url for i, url in enumerate(self._urls) if i not in self._starting])
                self.report(f"rollout server {index} is back ({self._urls[index]}) and serves from the next push on")
