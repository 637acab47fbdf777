"""Actor weights -> rollout servers: one broadcast group per pipeline stage, one coordinator that orders everything."""

import time
from concurrent import futures
from concurrent.futures import Future

from megarl.cluster.role import RoleGroup
from megarl.cluster.waiting import raise_failed, wait_all
from megarl.config import SyncConfig
from megarl.errors import RunError
from megarl.rollout.canary import Canary
from megarl.rollout.client import RolloutClient
from megarl.rollout.weights_group import num_bytes

POLL_S = 0.2  # between looks at the senders while the servers receive


class WeightSync:
    """The coordinator, in the trainer's process.

    In each group rank 0 is the stage's sending rank and the servers' ranks follow in server order. Groups are joined and
    buckets sent one after another: two stages in opposite orders on two servers would wait for each other for ever.
    """

    def __init__(
        self, actor: RoleGroup, client: RolloutClient, server_tensor_parallel: int, settings: SyncConfig, canary: Canary
    ):
        self.actor = actor
        self.canary = canary
        self.client = client
        self.timeout_s = settings.timeout_s
        world_size = 1 + len(client.urls) * server_tensor_parallel
        self.plans = actor.plan_buckets(settings.bucket_mb * 2**20)
        for stage in range(len(self.plans)):
            address, port = actor.sender_address(stage)
            joining = actor.start_join(stage, address, port, world_size, self._group(stage), self.timeout_s)
            servers = [
                client.init_weights_group(
                    server_index=index,
                    master_address=address,
                    master_port=port,
                    rank_offset=1 + index * server_tensor_parallel,
                    world_size=world_size,
                    group_name=self._group(stage),
                    backend=actor.backend,
                    timeout_s=self.timeout_s,
                )
                for index in range(len(client.urls))
            ]
            self._wait(servers, joining, f"joining the weight group of stage {stage}", self.timeout_s)
            wait_all(joining, f"joining the weight group of stage {stage}", self.timeout_s)

    def push(self, version: int) -> dict[str, float]:
        """Give every server the actor's present weights as `version`, and see that they are there.

        New requests wait meanwhile and cached prefixes are forgotten. Returns the metrics sync/*. Raises RunError, naming
        the stage and the bucket, and the server or the rank, where any part fails or is late, and naming the server whose
        answer to the canary is not the trainer's: the servers then hold a mixture and the run must end.
        """
        self.client.close_gate()
        self.client.pause(self.timeout_s)
        sent = time.perf_counter()
        for stage, buckets in enumerate(self.plans):
            last = stage == len(self.plans) - 1
            where = f"weight sync to version {version}, stage {stage}"
            sending = self.actor.start_send(stage)
            receiving = self.client.receive_weights(
                buckets, self._group(stage), str(version) if last else None, self.timeout_s
            )
            # Each bucket has the timeout, and names its server; this one is behind them all.
            self._wait([receiving], sending, where, self.timeout_s * (len(buckets) + 1))
            wait_all(sending, where, self.timeout_s)
        received = time.perf_counter()
        self.client.resume(self.timeout_s)
        self._check_versions(version)
        difference = self.canary.check(version, self.timeout_s)
        verified = time.perf_counter()
        self.client.open_gate()
        total = sum(num_bytes(bucket) for buckets in self.plans for bucket in buckets)
        return {
            "sync/gb_per_s": total / (received - sent) / 1e9,
            "sync/verify_s": verified - received,
            "sync/canary_diff": difference,
        }

    def _wait(self, servers: list[Future], sending: dict, where: str, timeout_s: float) -> None:
        """Until the servers are done; a failure on either side ends the wait, as the other would hang in a collective."""
        deadline = time.monotonic() + timeout_s
        while servers:
            done, servers = futures.wait(servers, timeout=POLL_S, return_when=futures.FIRST_COMPLETED)
            try:
                for server in done:
                    server.result()
                raise_failed(sending, "sending")
            except RunError as error:
                raise RunError(f"{where}: {error}") from error
            if servers and time.monotonic() > deadline:
                raise RunError(f"{where}: not done within {timeout_s:g} s (sync.timeout_s={self.timeout_s:g})")

    def _check_versions(self, version: int) -> None:
        for url, found in zip(self.client.urls, self.client.weight_versions(self.timeout_s)):
            if found != str(version):
                raise RunError(f"{url} says it has weights of version {found} after the sync to version {version}")

    @staticmethod
    def _group(stage: int) -> str:
        return f"megarl-weights-{stage}"
