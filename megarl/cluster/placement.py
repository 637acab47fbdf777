"""STRICT_PACK placement groups: checked against the cluster before anything waits, and removed on every exit."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from megarl.cluster.clean import remove_dead_groups
from megarl.config import Config
from megarl.errors import RunError

SERVER = "rollout server"
PROGRESS_S = 5.0  # between lines while the cluster is full


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
        return f"{self.role}: {_text(self.total)} on one node"


def group_requests(config: Config, device: str) -> list[GroupRequest]:
    """The groups that a run needs, those of the Megatron roles first: one bundle per rank, one per server.

    A colocated server has no group: it lives in the bundle of the actor's rank whose GPU is its first.
    """
    rollout, on_gpu, colocated = config.rollout, device == "cuda", config.placement == "colocated"
    requests = []
    for name, role in config.roles.megatron.items():
        cpus = role.rank_cpus(device) + (colocated_cpus(config) if colocated and name == "actor" else 0)
        requests += [GroupRequest(name, role.gpus_per_node, cpus, float(on_gpu))] * role.nodes
    if colocated:
        return requests
    server_group = GroupRequest(SERVER, 1, rollout.cpus_per_server, float(rollout.tensor_parallel * on_gpu))
    return requests + [server_group] * rollout.servers


def colocated_cpus(config: Config) -> float:
    """The servers' CPUs as a share of each of the actor's bundles: bundles are equal, not all of them have a server."""
    return config.rollout.servers * config.rollout.cpus_per_server / config.roles.actor.gpus_per_node


@dataclass(frozen=True)
class Node:
    name: str
    node_id: str
    total: dict[str, float]  # CPU and GPU, as `free`
    free: dict[str, float]


def living_nodes() -> list[Node]:
    free = ray._private.state.available_resources_per_node()  # no public call tells it by node
    return [
        Node(f"{n['NodeName']} ({n['NodeID'][:8]})", n["NodeID"], n["Resources"], free.get(n["NodeID"], {}))
        for n in ray.nodes()
        if n["Alive"]
    ]


def plan_nodes(requests: list[GroupRequest], nodes: list[Node], free: bool = False) -> list[Node]:
    """A node for each group, so that all fit together; groups of one multi-node role are on different nodes, in order.

    In what the nodes have in total, whoever holds it now, or in what is `free`. Roles of several nodes go first, then the
    largest group, each to the smallest room that fits. Raises RunError, with what is wanted and what each node has, where not
    all can be placed.
    """
    left = {node.name: dict(node.free if free else node.total) for node in nodes}
    chosen: dict[int, str] = {}

    def hardest_first(item: tuple[int, GroupRequest]) -> tuple:
        request = item[1]
        return not spans_nodes(request, requests), -request.total["GPU"], -request.total["CPU"]

    for index, request in sorted(enumerate(requests), key=hardest_first):
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
    by_name = {node.name: node for node in nodes}
    return [by_name[chosen[index]] for index in range(len(requests))]


def spans_nodes(request: GroupRequest, requests: list[GroupRequest]) -> bool:
    return request.role != SERVER and requests.count(request) > 1


def placement_table(requests: list[GroupRequest], nodes: list[Node]) -> str:
    rows = [("wanted, each on one node", "groups", "CPU", "GPU", "")]
    rows += [(r.role, str(requests.count(r)), *_amounts(r.total), "") for r in dict.fromkeys(requests)]
    rows += [("node", "total CPU", "total GPU", "free CPU", "free GPU")]
    rows += [(node.name, *_amounts(node.total), *_amounts(node.free)) for node in nodes]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"  {row[0]:{width}}" + "".join(f"{cell:>11}" for cell in row[1:]).rstrip() for row in rows)


def place(
    requests: list[GroupRequest], run_id: str, timeout_s: float, report: Callable[[str], None]
) -> list[PlacementGroup]:
    """Reserve all groups, named RUN_ID/ROLE/INDEX; the caller removes them. What dead runs hold is removed on the way.

    Raises RunError after `timeout_s`, or at once where they cannot fit; `report` gets a line every PROGRESS_S till then.
    """
    nodes = living_nodes()
    planned = plan_nodes(requests, nodes)
    # Two groups of 4 could share a node of 8, PACK has no order, and a small group could take the room of a large one. Where
    # others hold what is needed Ray chooses, as soon as it can, if each role has one node.
    pinned = any(spans_nodes(request, requests) for request in requests)
    with contextlib.suppress(RunError):
        planned, pinned = plan_nodes(requests, nodes, free=True), True
    groups: list[PlacementGroup] = []
    try:
        for position, (request, node) in enumerate(zip(requests, planned)):
            selector = [{"ray.io/node-id": node.node_id}] * request.num_bundles if pinned else None
            bundles = [request.bundle] * request.num_bundles
            index = [earlier.role for earlier in requests[:position]].count(request.role)
            name = f"{run_id}/{request.role}/{index}"
            groups.append(placement_group(bundles, strategy="STRICT_PACK", name=name, bundle_label_selector=selector))
        wait_for_room(requests, groups, timeout_s, report)
    except BaseException:
        remove(groups)
        raise
    return groups


def wait_for_room(
    requests: list[GroupRequest], groups: list[PlacementGroup], timeout_s: float, report: Callable[[str], None]
) -> None:
    start = time.monotonic()
    waiting = {group.ready(): request for request, group in zip(requests, groups)}
    while True:
        for what in remove_dead_groups():  # each time: Ray may notice only now that a driver died
            report(f"removed {what} of a dead run")
        left_s = timeout_s - (time.monotonic() - start)
        placed, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=max(0.0, min(PROGRESS_S, left_s)))
        for ref in placed:
            request = waiting.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                raise RunError(f"while waiting for room for {request}: {error}") from error
        if not waiting:
            return
        wanted, passed_s, nodes = ", ".join(map(str, waiting.values())), time.monotonic() - start, living_nodes()
        if passed_s >= timeout_s:
            lines = [f"cluster.placement_timeout_s: {timeout_s:g} s have passed without room for {wanted}"]
            lines += [placement_table(requests, nodes), *(f"  held by {held}" for held in held_groups(groups))]
            raise RunError("\n".join(lines))
        free = ", ".join(f"{node.name} {_text(node.free)}" for node in nodes)
        held = ", ".join(held_groups(groups)) or "no placement group"
        report(f"waiting for room, {passed_s:.0f} of {timeout_s:g} s: {wanted}; free: {free}; held by others: {held}")


def held_groups(but: list[PlacementGroup]) -> list[str]:
    """Who holds what: the placement groups of the cluster, without `but`."""
    ours = {group.id.hex() for group in but}
    held = []
    for group_id, group in placement_group_table().items():
        if group["state"] == "CREATED" and group_id not in ours:
            total = {key: sum(b.get(key, 0) for b in group["bundles"].values()) for key in ("CPU", "GPU")}
            held.append(f"{group['name'] or group_id[:8]} {_text(total)}")
    return held


def remove(groups: list[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


def _amounts(resources: dict[str, float]) -> tuple[str, str]:
    return f"{resources.get('CPU', 0):g}", f"{resources.get('GPU', 0):g}"


def _text(resources: dict[str, float]) -> str:
    return "{} CPU, {} GPU".format(*_amounts(resources))
