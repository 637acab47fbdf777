"""STRICT_PACK placement groups: checked against the cluster before anything waits, and removed on every exit."""

import time
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from megarl.config import Config
from megarl.errors import RunError


SERVER = "rollout server"


@dataclass(frozen=True)
class GroupRequest:
    """One STRICT_PACK group: it must fit on one node. A role of several nodes has one per node, on different nodes."""

    role: str
    num_bundles: int
    cpus: float  # of one bundle
    gpus: float  # of one bundle

    @property
    def total(self) -> dict[str, float]:
        return {"CPU": self.num_bundles * self.cpus, "GPU": self.num_bundles * self.gpus}

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        return f"{self.role}: {_amounts(self.total)} on one node"


def group_requests(config: Config, device: str) -> list[GroupRequest]:
    """The groups that a run needs, those of the Megatron roles first: one bundle per rank, one per server."""
    rollout, on_gpu = config.rollout, device == "cuda"
    requests = []
    for name, role in config.roles.megatron.items():
        requests += [GroupRequest(name, role.gpus_per_node, role.rank_cpus(device), float(on_gpu))] * role.nodes
    server_group = GroupRequest(SERVER, 1, rollout.cpus_per_server, float(rollout.tensor_parallel * on_gpu))
    return requests + [server_group] * rollout.servers


def plan_nodes(requests: list[GroupRequest], nodes: dict[str, dict[str, float]]) -> list[str]:
    """A node for each group, so that all fit together; groups of one multi-node role are on different nodes, in order.

    `nodes`: name -> total CPU and GPU. The largest group goes first, each to the smallest room that fits. Raises RunError,
    with what is wanted and what each node has, where not all can be placed.
    """
    left = {name: dict(total) for name, total in nodes.items()}
    chosen: dict[int, str] = {}
    for index, request in sorted(enumerate(requests), key=lambda item: (-item[1].total["GPU"], -item[1].total["CPU"])):
        siblings = {chosen[i] for i in chosen if requests[i].role == request.role != SERVER}
        fits = [n for n in left if n not in siblings and all(left[n].get(k, 0) + 1e-6 >= v for k, v in request.total.items())]
        if not fits:
            raise RunError(f"the cluster is too small: no node for {request}\n{placement_table(requests, nodes)}")
        chosen[index] = min(fits, key=lambda name: (left[name].get("GPU", 0), left[name].get("CPU", 0)))
        for key, value in request.total.items():
            left[chosen[index]][key] = left[chosen[index]].get(key, 0) - value
    for role in {request.role for request in requests} - {SERVER}:
        places = [i for i, request in enumerate(requests) if request.role == role]
        chosen |= dict(zip(places, sorted(chosen[i] for i in places)))
    return [chosen[index] for index in range(len(requests))]


def placement_table(requests: list[GroupRequest], nodes: dict[str, dict[str, float]]) -> str:
    wanted = [f"  wanted    {request}" for request in requests]
    available = [f"  node {name} has {_amounts(total)}" for name, total in nodes.items()]
    return "\n".join(wanted + available)


def place(requests: list[GroupRequest], timeout_s: float) -> list[PlacementGroup]:
    """Reserve all groups; RunError after `timeout_s`, or at once where they cannot fit. The caller removes them."""
    alive = {f"{n['NodeName']} ({n['NodeID'][:8]})": n for n in ray.nodes() if n["Alive"]}
    nodes = {name: node["Resources"] for name, node in alive.items()}
    planned = plan_nodes(requests, nodes)
    # Ray may choose where one node holds each role; else two groups of 4 could share a node of 8, and PACK has no order.
    spans = any(requests.count(request) > 1 for request in requests if request.role != SERVER)
    groups = []
    deadline = time.monotonic() + timeout_s
    try:
        for request, name in zip(requests, planned):
            selector = [{"ray.io/node-id": alive[name]["NodeID"]}] * request.num_bundles if spans else None
            bundles = [request.bundle] * request.num_bundles
            groups.append(placement_group(bundles, strategy="STRICT_PACK", bundle_label_selector=selector))
        for request, group in zip(requests, groups):
            try:
                ray.get(group.ready(), timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                raise RunError(
                    f"cluster.placement_timeout_s: {timeout_s:g} s have passed without room for {request}; other jobs hold it\n"
                    + placement_table(requests, nodes)
                ) from None
    except BaseException:
        remove(groups)
        raise
    return groups


def remove(groups: list[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _amounts(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
