"""STRICT_PACK placement groups: checked against the cluster before anything waits, and removed on every exit."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from megarl.cluster.clean import remove_dead_groups
from megarl.config import Config
from megarl.errors import RunError

SERVER, TEACHER, REWARD_SERVER = "rollout server", "teacher server", "reward server"
# by section of the config
SERVERS = {"rollout": SERVER, "roles.teacher": TEACHER, "roles.reward_server": REWARD_SERVER}
PROGRESS_S = 5.0  # between lines while the cluster is full
POLL_S = 0.5
RESERVE_S = 10.0  # for Ray to make groups where there is room


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

    Colocated, rollout servers and the critic have no groups: a server lives in the bundle of the actor's rank whose GPU
    is its first, a rank of the critic in that of the actor's rank of its number.
    """
    on_gpu, colocated = device == "cuda", config.placement == "colocated"
    roles, requests = config.roles.megatron, []
    for name, role in roles.items():
        cpus = role.rank_cpus(device)
        if colocated and name == "actor":
            cpus += colocated_cpus(config) + (roles["critic"].rank_cpus(device) if "critic" in roles else 0)
        if not (colocated and name == "critic"):
            requests += [GroupRequest(name, role.gpus_per_node, cpus, float(on_gpu))] * role.nodes
    for section, servers in config.servers.items():
        if not (colocated and section == "rollout"):
            group = GroupRequest(SERVERS[section], 1, servers.cpus_per_server, float(servers.tensor_parallel * on_gpu))
            requests += [group] * servers.servers
    return requests


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

    In what the nodes have in total, whoever holds it now, or in what is `free`. Raises RunError, with what is wanted
    and what each node has, where not all can be placed.
    """
    by_name = {node.name: node for node in nodes}
    for pick in (min, max):  # the smallest room that fits; where that leaves someone out, the largest
        left = {node.name: dict(node.free if free else node.total) for node in nodes}
        chosen, unplaced = _choose(requests, left, pick)
        if unplaced is None:
            return [by_name[chosen[index]] for index in range(len(requests))]
    raise RunError(f"the cluster is too small: no node for {unplaced}\n{placement_table(requests, nodes)}")


def _choose(
    requests: list[GroupRequest], left: dict[str, dict[str, float]], pick: Callable
) -> tuple[dict[int, str], GroupRequest | None]:
    """(index of a request -> node, the first that did not fit). Roles of several nodes go first, then the largest."""
    chosen: dict[int, str] = {}

    def hardest_first(item: tuple[int, GroupRequest]) -> tuple:
        request = item[1]
        return not spans_nodes(request, requests), -request.total["GPU"], -request.total["CPU"]

    for index, request in sorted(enumerate(requests), key=hardest_first):
        siblings = {chosen[i] for i in chosen if requests[i].role == request.role and spans_nodes(request, requests)}
        total = request.total
        fits = [n for n in left if n not in siblings and all(left[n].get(k, 0) + 1e-6 >= v for k, v in total.items())]
        if not fits:
            return chosen, request
        chosen[index] = pick(fits, key=lambda name: (left[name].get("GPU", 0), left[name].get("CPU", 0)))
        for key, value in total.items():
            left[chosen[index]][key] = left[chosen[index]].get(key, 0) - value
    for role in {request.role for request in requests if spans_nodes(request, requests)}:
        places = [i for i, request in enumerate(requests) if request.role == role]
        chosen |= dict(zip(places, sorted(chosen[i] for i in places)))
    return chosen, None


def spans_nodes(request: GroupRequest, requests: list[GroupRequest]) -> bool:
    return request.role not in SERVERS.values() and requests.count(request) > 1


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

    None is made before all of them fit: of two runs with a half each neither would ever start. Raises RunError after
    `timeout_s`, or at once where they cannot fit; `report` gets a line every PROGRESS_S till then.
    """
    plan_nodes(requests, living_nodes())
    start, lines = time.monotonic(), 0
    while True:
        for what in remove_dead_groups():  # each time: Ray may notice only now that a driver died
            report(f"removed {what} of a dead run")
        nodes, passed_s = living_nodes(), time.monotonic() - start
        if (planned := _plan_free(requests, nodes)) and (groups := _reserve(requests, planned, run_id)):
            return groups
        wanted = ", ".join(map(str, dict.fromkeys(requests)))
        if passed_s >= timeout_s:
            told = [f"cluster.placement_timeout_s: {timeout_s:g} s have passed without room for {wanted}"]
            told += [placement_table(requests, nodes), *(f"  held by {held}" for held in held_groups())]
            raise RunError("\n".join(told))
        if passed_s >= lines * PROGRESS_S:
            lines += 1
            free = ", ".join(f"{node.name} {_text(node.free)}" for node in nodes)
            held = ", ".join(held_groups()) or "no placement group"
            waited = f"{passed_s:.0f} of {timeout_s:g} s"
            report(f"waiting for room, {waited}: {wanted}; free: {free}; held by others: {held}")
        time.sleep(POLL_S)


def _plan_free(requests: list[GroupRequest], nodes: list[Node]) -> list[Node] | None:
    with contextlib.suppress(RunError):
        return plan_nodes(requests, nodes, free=True)
    return None


def _reserve(requests: list[GroupRequest], planned: list[Node], run_id: str) -> list[PlacementGroup] | None:
    """Groups on the planned nodes, which fixes the ranks' order; None, and none of them, where others were faster."""
    groups: list[PlacementGroup] = []
    deadline = time.monotonic() + RESERVE_S
    try:
        for position, (request, node) in enumerate(zip(requests, planned)):
            index = [earlier.role for earlier in requests[:position]].count(request.role)
            groups.append(
                placement_group(
                    [request.bundle] * request.num_bundles,
                    strategy="STRICT_PACK",
                    name=f"{run_id}/{request.role}/{index}",
                    bundle_label_selector=[{"ray.io/node-id": node.node_id}] * request.num_bundles,
                )
            )
        if all(group.wait(max(0.0, deadline - time.monotonic())) for group in groups):
            return groups
    except BaseException:
        remove(groups)
        raise
    remove(groups)
    return None


def held_groups() -> list[str]:
    """Who holds what: the placement groups of the cluster."""
    held = []
    for group_id, group in placement_group_table().items():
        if group["state"] == "CREATED":
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
