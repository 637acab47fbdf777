"""Actor weights -> rollout servers, verified. One coordinator, in the trainer's process, orders everything."""

import time
import uuid
from concurrent import futures
from concurrent.futures import Future

from megarl.cluster.role import RoleGroup
from megarl.cluster.waiting import raise_failed, wait_all
from megarl.config import SyncConfig
from megarl.errors import RunError
from megarl.rollout.canary import Canary, Expected
from megarl.rollout.client import RolloutClient

POLL_S = 0.2  # between looks at the senders while the servers receive


class WeightSync:
    """What every push has in common; `_send` is that of a placement."""

    in_turns = False  # whether servers and actor take turns on the same GPUs

    def __init__(
        self, actor: RoleGroup, client: RolloutClient, server_tensor_parallel: int, settings: SyncConfig, canary: Canary
    ):
        self.actor = actor
        self.client = client
        self.server_tensor_parallel = server_tensor_parallel
        self.canary = canary
        self.timeout_s = settings.timeout_s
        self.plans = actor.plan_buckets(settings.bucket_mb * 2**20)
        self.memory: dict[str, float] = {}  # metrics of the last push
        self.num_bytes = sum(bucket.num_bytes for buckets in self.plans for bucket in buckets)

    def make_room(self) -> None:
        """Before the actor works: have the servers leave its GPUs, where they share them."""

    def forget_servers(self) -> None:
        """One of them is started again: nothing that they were told before is known to all of them."""

    def leave_gpus(self) -> None:
        """Before servers are started again: have the actor leave their GPUs, where they share them."""

    def push(self, version: int) -> dict[str, float]:
        """Give every server the actor's present weights as `version`, and see that they are there.

        New requests wait meanwhile and cached prefixes are forgotten. Returns the metrics sync/*. Raises SyncFailed, naming
        the stage, the bucket and the server or the rank, where any part fails or is late: the servers then hold a mixture,
        and the gate stays closed. Raises RunError naming the server whose answer to the canary is not the trainer's.
        """
        self.client.close_gate()
        try:
            self.client.pause(self.timeout_s)
            expected, send_s = self._send(version)
            received = time.perf_counter()
            self.client.resume(self.timeout_s)
            self._check_versions(version)
            answers = self.canary.ask_servers(version, self.timeout_s)
        except RunError as error:
            raise SyncFailed(f"weight sync to version {version}, {error}") from error
        difference = self.canary.compare(version, expected(), answers)
        verified = time.perf_counter()
        self.client.open_gate()
        return {
            "sync/gb_per_s": self.num_bytes / send_s / 1e9,
            "sync/verify_s": verified - received,
            "sync/canary_diff": difference,
            **self.memory,
        }

    def _send(self, version: int) -> tuple[Expected, float]:
        """The weights to every server. Returns the trainer's answer to the canary, which may be on its way, and the seconds
        from the first bucket's start until the last one was loaded."""
        raise NotImplementedError

    def _check_versions(self, version: int) -> None:
        for url, found in zip(self.client.urls, self.client.weight_versions(self.timeout_s)):
            if found != str(version):
                raise RunError(f"{url} says that it has weights of version {found}")


class SyncFailed(RunError):
    """A push that did not arrive, by the fault of a server perhaps."""


class BroadcastSync(WeightSync):
    """Actor and servers on different GPUs: a broadcast group per pipeline stage.

    In each group rank 0 is the stage's sending rank and the servers' ranks follow in server order. Groups are joined and
    stages sent one after another: two stages in opposite orders on two servers would wait for each other for ever.
    """

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._members: list[str] = []
        self._name = ""

    def forget_servers(self) -> None:
        self._members = []

    def _send(self, version: int) -> tuple[Expected, float]:
        self.actor.place("score")  # its weights may be in host memory
        if self._members != self.client.urls:
            self._join()
        start = time.perf_counter()
        try:
            for stage, buckets in enumerate(self.plans):
                last = stage == len(self.plans) - 1
                timeout_s = self.timeout_s * (len(buckets) + 1)  # of them all; the sender bounds each
                sending = self.actor.start_send(stage, self.timeout_s)
                receiving = self.client.receive_weights(
                    buckets, self._group(stage), str(version) if last else None, timeout_s
                )
                expected = self.canary.ask_trainer(version) if last else None  # right behind the sending
                try:
                    self._wait([receiving], sending, f"stage {stage}", timeout_s)
                except RunError as error:
                    raise self._with_senders_word(error, sending) from error
        except RunError:
            self.forget_servers()  # groups that one has left, or hangs in, serve no further push
            raise
        return expected, time.perf_counter() - start

    def _with_senders_word(self, error: RunError, sending: dict) -> RunError:
        """Once the sender has given up, which also frees the other servers: it knows the bucket."""
        try:
            wait_all(sending, "on the actor's side", 2 * self.timeout_s)
        except RunError as word:
            if str(word) not in str(error):
                return RunError(f"{error}; {word}")
        return error

    def _join(self) -> None:
        """New groups of the stages' senders and all servers; those before are given up."""
        self._name = uuid.uuid4().hex[:8]
        ranks = [f"{url} (rank {rank})" for url in self.client.urls for rank in range(self.server_tensor_parallel)]
        for stage in range(len(self.plans)):
            address, port = self.actor.sender_address(stage)
            joining = self.actor.start_join(stage, address, port, ranks, self._group(stage), self.timeout_s)
            servers = [
                self.client.join_weights_group(
                    server_index=index,
                    master_address=address,
                    master_port=port,
                    rank_offset=1 + index * self.server_tensor_parallel,
                    world_size=1 + len(ranks),
                    group_name=self._group(stage),
                    backend=self.actor.backend,
                    timeout_s=self.timeout_s,
                )
                for index in range(len(self.client.urls))
            ]
            self._wait(servers, joining, f"joining the group of stage {stage}", self.timeout_s)
        self._members = list(self.client.urls)

    def _wait(self, servers: list[Future], actor: dict, where: str, timeout_s: float) -> None:
        """Until both sides are done; a failure on either ends the wait, as the other would hang in a collective."""
        deadline = time.monotonic() + timeout_s
        try:
            while servers:
                done, servers = futures.wait(servers, timeout=POLL_S, return_when=futures.FIRST_COMPLETED)
                for server in done:
                    server.result()
                raise_failed(actor, "on the actor's side")
                if servers and time.monotonic() > deadline:
                    raise RunError(f"not done within {timeout_s:g} s (sync.timeout_s={self.timeout_s:g})")
            wait_all(actor, "on the actor's side", timeout_s)
        except RunError as error:
            raise RunError(f"{where}: {error}") from error

    def _group(self, stage: int) -> str:
        return f"megarl-weights-{self._name}-{stage}"


class ColocatedSync(WeightSync):
    """Actor and servers on the same GPUs, in turns. Weights go by handles of the sender's memory: CUDA IPC.

    A turn of the servers ends with `make_room`, that of the actor with `push`. Each step below is over on all ranks and
    servers before the next one begins, so that old weights, new weights and KV cache are never there together: the servers
    let go of both, and take the cache again when the actor's weights are in host memory.
    """

    in_turns = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.servers_hold_gpus = False  # at the start they have made room

    def leave_gpus(self) -> None:
        self.actor.place("generate")
        self.servers_hold_gpus = True  # all are started anew

    def make_room(self) -> None:
        if not self.servers_hold_gpus:
            return
        self.client.leave_gpus(self.timeout_s)
        self.servers_hold_gpus = False

    def _send(self, version: int) -> tuple[Expected, float]:
        self.make_room()
        self.actor.place("score")
        self.client.resume_memory("weights", self.timeout_s)
        servers = dict.fromkeys(self.client.urls, self.server_tensor_parallel)  # url -> ranks
        start = time.perf_counter()
        for stage, buckets in enumerate(self.plans):
            last = stage == len(self.plans) - 1
            sharing = self.actor.start_share(stage, servers, str(version) if last else None, self.timeout_s)
            wait_all(sharing, f"stage {stage}: handing weights over", self.timeout_s * (len(buckets) + 1))
        send_s = time.perf_counter() - start
        if used := self.actor.used_bytes():
            self.memory = {"memory/sync_gpu_gb": used / 1e9}
        expected = self.canary.ask_trainer(version)
        self.actor.place("generate")  # behind the canary
        self.client.resume_memory("kv_cache", self.timeout_s)
        self.servers_hold_gpus = True
        return expected, send_s
