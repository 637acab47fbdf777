"""Everything that a run starts, and its end: the Ray cluster, placement groups, ranks and servers."""

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import placement
from megarl.cluster.role import RoleGroup
from megarl.cluster.waiting import raise_failed, wait_all
from megarl.cluster.workers import EngineWorker, ServerWorker
from megarl.config import Config
from megarl.errors import RunError

OBJECT_STORE_BYTES = 2**30  # samples pass through it, weights never do
STOP_TIMEOUT_S = 15.0
FOLDER_PREFIX = "megarl-ray-"  # then the trainer's pid


class Cluster:
    """A context: enter it to have Ray and the roles' room, leave it and nothing is left, whatever happened inside."""

    def __init__(self, config: Config, device: str, log_directory: Path):
        self.config = config
        self.device = device
        self.log_directory = log_directory.resolve()
        self._on_exit = contextlib.ExitStack()
        self._servers: dict[str, ray.actor.ActorHandle] = {}

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            self._start_ray(stack)
            self._requests = placement.group_requests(self.config, self.device)
            self._groups = placement.place(self._requests, self.config.cluster.placement_timeout_s)
            stack.callback(placement.remove, self._groups)
            stack.callback(self._stop_servers)
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._on_exit.close()

    def start_servers(self) -> None:
        """Start all rollout servers and return at once; `wait_servers` waits for them, `check_servers` does not."""
        rollout, model = self.config.rollout, self.config.model
        for index, group in enumerate(self._role_groups(placement.SERVER)):
            # Ray would SIGKILL a dying worker's children; ours must live to end the server (rollout/launch.py).
            keep_children = {"RAY_kill_child_processes_on_worker_exit": "false"}
            options = self._in_bundle(group, 0, rollout.cpus_per_server, rollout.tensor_parallel, keep_children)
            # The second thread is for `stop`, which must not queue behind `wait_ready`.
            server = ray.remote(ServerWorker).options(**options, max_concurrency=2).remote(
                log_path=str(self.log_directory / f"server-{index}.log"),
                model_path=str(Path(model.path).resolve()),
                dtype=model.dtype,
                device=self.device,
                tensor_parallel=rollout.tensor_parallel,
                port=rollout.ports[index] if rollout.ports else None,
                server_args={"random_seed": self.config.seed + index} | rollout.server_args,
                start_timeout_s=rollout.start_timeout_s,
                this_machine_only=self.config.cluster.ray_address is None,
            )
            self._servers[f"rollout server {index}"] = server
        self._ready = {name: server.start.remote() for name, server in self._servers.items()}

    def wait_servers(self) -> list[str]:
        """The servers' URLs, once all of them generate. Raises RunError with the log's end of one that does not."""
        return wait_all(self._ready, "starting", self.config.rollout.start_timeout_s + STOP_TIMEOUT_S)

    def check_servers(self) -> None:
        """Raise RunError now if a server that was started has failed already."""
        raise_failed(self._ready, "starting")

    def server_deaths(self) -> list[str]:
        """For each server that is dead, how it died."""
        reports = {name: server.death_report.remote() for name, server in self._servers.items()}
        deaths = []
        for name, report in reports.items():
            try:
                deaths += wait_all({name: report}, "asking how it died", STOP_TIMEOUT_S)
            except RunError as error:
                deaths.append(str(error))
        return [death for death in deaths if death]

    def _stop_servers(self) -> None:
        """All at the same time: a server needs seconds to end."""
        stops = [server.stop.remote() for server in self._servers.values()]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)
        for server in self._servers.values():
            ray.kill(server)

    def start_role(self, name: str) -> RoleGroup:
        """All ranks of `actor` or `critic` with the model loaded."""
        role = self.config.roles.megatron[name]
        groups = self._role_groups(name)
        cpus = next(request.cpus for request in self._requests if request.role == name)
        handles = []
        for rank in range(role.world_size):
            node, bundle = divmod(rank, role.gpus_per_node)
            options = self._in_bundle(groups[node], bundle, cpus, 1, self._rank_environment())
            handle = ray.remote(EngineWorker).options(**options).remote(rank, str(self.log_directory / f"{name}-{rank}.log"))
            handles.append(handle)
            self._on_exit.callback(ray.kill, handle)
        group = RoleGroup(name, handles, self.config.cluster.call_timeout_s)
        model = self.config.model.model_copy(update={"path": str(Path(self.config.model.path).resolve())})
        head = "value" if name == "critic" else "lm"
        group.start(model, role, head, self.config.seed, self.config.cluster.start_timeout_s)
        return group

    def _role_groups(self, role: str) -> list:
        return [group for request, group in zip(self._requests, self._groups) if request.role == role]

    def _start_ray(self, stack: contextlib.ExitStack) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.config.cluster.ray_address
        local = {}
        if address is None:
            # Unix sockets live below it and their paths must stay under 107 characters.
            remove_stale_folders()
            folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-", dir="/tmp")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": folder}
            if self.device == "cpu":
                local["num_gpus"] = 0
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **local)
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(f"cluster.ray_address: cannot use Ray at {address or 'this machine'}: {error}") from error
        stack.callback(ray.shutdown)
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C; ray.init has put its own handler in place
            signal.signal(number, signal.default_int_handler)

    def _in_bundle(self, group, bundle: int, cpus: float, gpus: int, environment: dict[str, str]) -> dict:
        """Ray options that pin an actor to a bundle; an actor outside its group could wait for ever, in silence."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {
            "num_cpus": cpus,
            "num_gpus": gpus if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            "runtime_env": {"env_vars": hidden | environment},
        }

    def _rank_environment(self) -> dict[str, str]:
        if self.device == "cuda":
            # SGLang sets CUMEM=0 in its servers, and both ends of a broadcast must agree. Multicast stays off.
            return {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        # Where the machine's own name does not resolve, gloo finds no other interface.
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if self.config.cluster.ray_address is None else {}
        return {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **loopback}


def remove_stale_folders() -> None:
    """Ray's folders of trainers that were killed before they could remove them."""
    for folder in Path("/tmp").glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).split("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)
