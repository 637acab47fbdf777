"""Everything that a run starts, and its end: the Ray cluster, placement groups, ranks and servers."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import placement
from megarl.cluster.clean import make_folder, remove_stale_folders
from megarl.cluster.connect import connect
from megarl.cluster.placement import Node
from megarl.cluster.role import RoleGroup
from megarl.cluster.run_tag import RunTag, new_run_id
from megarl.cluster.waiting import raise_failed, wait_all
from megarl.cluster.workers import EngineWorker, ServerWorker
from megarl.config import Config, CriticConfig, ModelConfig
from megarl.errors import RunError
from megarl.rollout.seeds import SERVER_ARGS

OBJECT_STORE_BYTES = 2**30  # samples pass through it, weights never do
STOP_TIMEOUT_S = 15.0
GPU_MEMORY_S = 2.0


class Cluster:
    """A context: enter it to have Ray and the roles' room, leave it and nothing is left, whatever happened inside."""

    def __init__(
        self,
        config: Config,
        device: str,
        log_directory: Path,
        run_id: str | None = None,
        report: Callable[[str], None] = print,
        parts: Collection[str] | None = None,
    ):
        """All that is started carries `run_id`, by default a new one; `report` gets the lines of a wait for room.

        `parts`: roles, and kinds of servers as `placement.SERVERS` names them, that there is to be room for; None: all.
        """
        self.tag = RunTag.of_this_process(run_id or new_run_id(config.name))
        self.report = report
        self.config = config
        self.device = device
        self.parts = parts
        self.log_directory = log_directory.resolve()
        self._on_exit = contextlib.ExitStack()
        self._servers: dict[str, ray.actor.ActorHandle] = {}
        self._ready: dict[str, ray.ObjectRef] = {}  # by server: its URL
        self._roles: dict[str, RoleGroup] = {}

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            self.start_ray(stack)
            requests = placement.group_requests(self.config, self.device)
            self._requests = [request for request in requests if self._has(request.role)]
            self._groups = placement.place(
                self._requests, self.tag.run_id, self.config.cluster.placement_timeout_s, self.report
            )
            stack.callback(placement.remove, self._groups)
            stack.callback(self._end_servers)
            self._on_exit = stack.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """A RunError leaves with what is known of the processes that died or hang, and the ends of their logs."""
        with self._on_exit:
            if isinstance(error, RunError) and (deaths := self._deaths(str(error))):
                raise RunError("\n".join([str(error), *deaths])) from error

    def _has(self, part: str) -> bool:
        return self.parts is None or part in self.parts

    def start_servers(self) -> None:
        """Start all servers and return at once; `wait_servers`, `wait_teachers` and `wait_reward_servers` wait for
        them, `check_servers` does not."""
        for section, servers in self.config.servers.items():
            for index in range(servers.servers if self._has(placement.SERVERS[section]) else 0):
                self._servers[f"{placement.SERVERS[section]} {index}"] = self._server(section, index)
        self._ready = {name: server.start.remote() for name, server in self._servers.items()}

    def _server(self, section: str, index: int) -> ray.actor.ActorHandle:
        kind, servers = placement.SERVERS[section], self.config.servers[section]
        model = self._model("actor" if section == "rollout" else section.removeprefix("roles."))
        first_rank, shared_gpus = index * servers.tensor_parallel, None
        if section == "rollout" and self._colocated:  # the rank has the bundle's GPU, and both use it
            group, bundle, gpus = self._role_groups("actor")[0], first_rank, 0
            cpus = placement.colocated_cpus(self.config)
            shared_gpus = ",".join(self._actor_gpus()) if self.device == "cuda" else None
        else:
            group, bundle, gpus = self._role_groups(kind)[index], 0, servers.tensor_parallel
            cpus = servers.cpus_per_server
        repeatable = SERVER_ARGS if section == "rollout" and self.config.rollout.deterministic else {}
        # Ray would SIGKILL a dying worker's children; ours must live to end the server (rollout/launch.py).
        keep_children = {"RAY_kill_child_processes_on_worker_exit": "false"}
        options = self._in_bundle(f"{kind}/{index}", group, bundle, cpus, gpus, keep_children)
        # The other threads are for `stop`, which must not queue behind `wait_ready`, and for `gpu_memory`.
        return (
            ray.remote(ServerWorker)
            .options(**options, max_concurrency=3)
            .remote(
                log_path=self._server_log(f"{kind} {index}"),
                model_path=model.path,
                dtype=model.dtype,
                device=self.device,
                tensor_parallel=servers.tensor_parallel,
                port=servers.ports[index] if servers.ports else None,
                server_args={"random_seed": self.config.seed + index} | repeatable | servers.server_args,
                start_timeout_s=servers.start_timeout_s,
                this_machine_only=self.config.cluster.ray_address is None,
                shared_gpus=shared_gpus,
                first_gpu=first_rank,
                section=section,
                is_classifier=kind == placement.REWARD_SERVER,
            )
        )

    def wait_servers(self) -> list[str]:
        """The rollout servers' URLs, once all of them generate; RunError with the log's end of one that does not."""
        return self._wait_ready(placement.SERVER, self.config.rollout.start_timeout_s)

    def wait_teachers(self) -> list[str]:
        """The same of the teacher's servers."""
        return self._wait_ready(placement.TEACHER, self.config.roles.teacher.start_timeout_s)

    def wait_reward_servers(self) -> list[str]:
        """The same of those of the reward `model`."""
        return self._wait_ready(placement.REWARD_SERVER, self.config.roles.reward_server.start_timeout_s)

    def _wait_ready(self, kind: str, start_timeout_s: float) -> list[str]:
        ready = {name: url for name, url in self._ready.items() if name.startswith(kind)}
        return wait_all(ready, "starting", start_timeout_s + STOP_TIMEOUT_S)

    def restart_server(self, index: int) -> ray.ObjectRef:
        """Kill what is left of a rollout server and start it anew; returns at once."""
        return self._servers[f"{placement.SERVER} {index}"].restart.remote()

    def has_started(self, start: ray.ObjectRef) -> bool:
        """Whether a restarted server is ready, or has failed."""
        return bool(ray.wait([start], timeout=0)[0])

    def wait_server(self, index: int, start: ray.ObjectRef) -> str:
        """The URL of a restarted server. Raises RunError as `wait_servers` does."""
        name, timeout_s = f"{placement.SERVER} {index}", self.config.rollout.start_timeout_s + 2 * STOP_TIMEOUT_S
        return wait_all({name: start}, "starting again", timeout_s)[0]

    def check_servers(self) -> None:
        """Raise RunError now if a server that was started has failed already."""
        raise_failed(self._ready, "starting")

    def _deaths(self, known: str) -> list[str]:
        """How servers and ranks died, but for a server whose log `known` cites already."""
        reports = {name: server.death_report.remote() for name, server in self._servers.items()}
        deaths = []
        for name, report in reports.items():
            if self._server_log(name) in known:
                continue
            try:
                deaths += wait_all({name: report}, "asking how it died", STOP_TIMEOUT_S)
            except RunError as error:
                deaths.append(str(error))
        return [death for death in deaths if death] + [
            death for role in self._roles.values() for death in role.deaths()
        ]

    def _server_log(self, name: str) -> str:
        """server-0.log, teacher-server-0.log"""
        return str(self.log_directory / f"{name.removeprefix('rollout ').replace(' ', '-')}.log")

    def gpu_memory(self) -> dict[tuple[str, str, int], int]:
        """Bytes that each role holds of GPUs, by (role, node, number of the GPU there): `machine.gpu_memory` in the
        processes of all ranks and servers that answer in GPU_MEMORY_S. May be called from any thread."""
        if self.device == "cpu":
            return {}
        sections = {kind: section.removeprefix("roles.") for section, kind in placement.SERVERS.items()}
        workers = [(role.name, handle) for role in list(self._roles.values()) for handle in role.handles]
        workers += [(sections[name.rpartition(" ")[0]], server) for name, server in list(self._servers.items())]
        asked = {handle.gpu_memory.remote(): role for role, handle in workers}
        held: dict[tuple[str, str, int], int] = {}
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=GPU_MEMORY_S)[0] if asked else []:
            with contextlib.suppress(RayError):  # of one that died
                node, by_gpu = ray.get(answer)
                for gpu, num_bytes in by_gpu.items():
                    key = asked[answer], node, gpu
                    held[key] = held.get(key, 0) + num_bytes
        return held

    def stop_servers(self) -> None:
        """All at the same time: a server needs seconds to end."""
        stops = [server.stop.remote() for server in self._servers.values()]
        if stops:
            ray.wait(stops, num_returns=len(stops), timeout=STOP_TIMEOUT_S)

    def _end_servers(self) -> None:
        self.stop_servers()
        for server in self._servers.values():
            ray.kill(server)

    def start_role(self, name: str, head: Literal["lm", "value"] | None = None) -> RoleGroup:
        """All ranks of `actor`, `critic` or `reward_model` with the model loaded.

        `head`: None is an actor's logits, and the others' value head. An actor with a value head is a reward model in
        training: its loss sees differences of values only, so the head has no bias.
        """
        role, is_trained = self.config.roles.megatron[name], name in self.config.roles.trained
        if self._colocated and is_trained:
            role = role.model_copy(update={"offload": role.offload or "all"})
        head = head or ("lm" if name == "actor" else "value")
        if head == "value" and not isinstance(role, CriticConfig):
            role = CriticConfig(**dict(role), value_head_bias=name == "reward_model")
        group = self._ranks(name)
        start_timeout_s = self.config.cluster.start_timeout_s
        group.start(self._model(name), role, head, is_trained, self.config.seed, start_timeout_s)
        return group

    def _model(self, role: str) -> ModelConfig:
        """What a role starts from, for a process with another working directory."""
        model = self.config.model_of(role)
        return model.model_copy(update={"path": str(Path(model.path).resolve())})

    def _ranks(self, name: str) -> RoleGroup:
        """The role's processes, made at the first call."""
        if name in self._roles:
            return self._roles[name]
        role = self.config.roles.megatron[name]
        shares = self._colocated and name == "critic"  # the actor's bundles and their GPUs
        groups = self._role_groups("actor" if shares else name)
        gpus = self._actor_gpus() if shares and self.device == "cuda" else [None] * role.world_size
        logs = [self.log_directory / f"{name}-{rank}.log" for rank in range(role.world_size)]
        nodes = [node_of(group) for group in groups for _ in range(role.gpus_per_node)]
        handles = []
        for rank, log in enumerate(logs):
            node, bundle = divmod(rank, role.gpus_per_node)
            cpus, num_gpus = role.rank_cpus(self.device), int(not shares)
            environment = self.rank_environment()
            options = self._in_bundle(f"{name}/{rank}", groups[node], bundle, cpus, num_gpus, environment)
            handle = ray.remote(EngineWorker).options(**options).remote(rank, str(log), gpus[rank])
            handles.append(handle)
            self._on_exit.callback(ray.kill, handle)
        self._roles[name] = RoleGroup(name, handles, logs, nodes, self.config.cluster.call_timeout_s)
        return self._roles[name]

    @property
    def _colocated(self) -> bool:
        return self.config.placement == "colocated"

    def _actor_gpus(self) -> list[str]:
        """The actor's GPUs in rank order, each as CUDA_VISIBLE_DEVICES names it."""
        return self._ranks("actor").visible_gpus(self.config.cluster.start_timeout_s)

    def _role_groups(self, role: str) -> list:
        return [group for request, group in zip(self._requests, self._groups) if request.role == role]

    def start_ray(self, stack: contextlib.ExitStack) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = self.config.cluster.ray_address
        local = {}
        if address is None:
            remove_stale_folders()
            folder = make_folder(self.tag)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_temp_dir": str(folder)}
            if self.device == "cpu":
                local["num_gpus"] = 0
        stack.callback(ray.shutdown)  # nothing where nothing was started
        job = JobConfig(metadata=self.tag.variables)
        connect(address, "cluster.ray_address", namespace=self.tag.run_id, job_config=job, **local)
        for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C; ray.init has put its own handler of SIGTERM there
            if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores the other
                signal.signal(number, signal.default_int_handler)

    def _in_bundle(self, name: str, group, bundle: int, cpus: float, gpus: int, environment: dict[str, str]) -> dict:
        """Ray options that name an actor and pin it to a bundle: outside of one it could wait for ever, in silence."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {
            "name": f"{self.tag.run_id}/{name}",
            "num_cpus": cpus,
            "num_gpus": gpus if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            "runtime_env": {"env_vars": hidden | environment | self.tag.variables},
        }

    def rank_environment(self) -> dict[str, str]:
        if self.device == "cuda":
            # SGLang sets CUMEM=0 in its servers, and both ends of a broadcast must agree. Multicast stays off.
            return {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if self.config.cluster.ray_address is None else {}
        return {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **loopback}


def node_of(group: PlacementGroup) -> Node:
    """The node that holds a STRICT_PACK group."""
    node_id = placement_group_table(group)["bundles_to_node_id"][0]
    return next(node for node in placement.living_nodes() if node.node_id == node_id)
