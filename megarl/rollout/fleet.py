"""The rollout servers as the trainer sees them: they generate, they take weights, and one that dies is started again."""

from collections.abc import Callable
from typing import Any

from megarl.cluster.cluster import Cluster
from megarl.errors import RunError
from megarl.rollout.client import RolloutClient
from megarl.rollout.sync import SyncFailed, WeightSync
from megarl.sample import Prompt, Sample


class Fleet:
    """A server that was started again serves from the next push on, so never with other weights than the present ones."""

    def __init__(
        self, cluster: Cluster, client: RolloutClient, sync: WeightSync, max_restarts: int, report: Callable[[str], None]
    ):
        """`max_restarts` of all servers together; then the run ends. `report` gets a line for each."""
        self.cluster = cluster
        self.client = client
        self.sync = sync
        self.max_restarts = max_restarts
        self.report = report
        self.version = 0
        self.restarts = 0
        self._urls = list(client.urls)  # by index
        self._starting: dict[int, Any] = {}  # index -> what its start will return

    def generate(self, prompts: list[Prompt], group_size: int, tokenizer, temperature: float | None = None) -> list[Sample]:
        """As the client's; a dead server's requests are made again elsewhere, or by its successor if it was the only one."""
        return self.client.generate(prompts, group_size, tokenizer, temperature, while_waiting=self._tend)

    def push(self, version: int) -> dict[str, float]:
        """As `WeightSync.push`, once more where a server died or hangs in it: after that one was started again, without the
        others waiting for it."""
        self.version = version
        self._restart_dead()
        while True:
            self._admit(wait=not self.client.urls or self.sync.in_turns)
            try:
                return self.sync.push(version)
            except SyncFailed as failure:
                silent = self.client.silent(paused=self.sync.in_turns)
                if not silent:
                    raise
                self.sync.leave_gpus()
                for url in self.client.urls if self.sync.in_turns else silent:
                    self._restart(url, str(failure))

    def make_room(self) -> None:
        """Before the actor works, where servers share its GPUs: have them leave, those too that are just starting."""
        if self.sync.in_turns:
            self._restart_dead()
            self._admit(wait=True)
        self.sync.make_room()

    def _tend(self) -> None:
        """While requests run: start dead servers again, and bring them back at once where none is left."""
        self._restart_dead()
        if not self.client.urls:
            self.push(self.version)

    def _restart_dead(self) -> None:
        for url, why in self.client.take_dead().items():
            self._restart(url, why)

    def _restart(self, url: str, why: str) -> None:
        index = self._urls.index(url)
        name = f"rollout server {index} ({url})"
        if self.restarts == self.max_restarts:
            raise RunError(f"{name} is gone, after {self.restarts} restarts (rollout.max_restarts={self.max_restarts}): {why}")
        self.restarts += 1
        self.report(f"warning: {name} is gone and is started again ({self.restarts} of {self.max_restarts}): {why}")
        self.client.remove(url)
        self._starting[index] = self.cluster.restart_server(index)

    def _admit(self, wait: bool) -> None:
        """Give the client the restarted servers that are ready; with `wait` all of them."""
        for index in list(self._starting):
            if wait or self.cluster.has_started(self._starting[index]):
                self._urls[index] = self.cluster.wait_server(index, self._starting.pop(index))
                self.client.admit([url for i, url in enumerate(self._urls) if i not in self._starting])
                self.report(f"rollout server {index} is back ({self._urls[index]}) and serves from the next push on")
