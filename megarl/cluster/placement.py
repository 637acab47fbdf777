"""STRICT_PACK placement groups: checked against the cluster before anything waits, and removed on every exit."""

import time
from collections.abc import Iterator
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
        cpus_per_rank = role.cpus_per_rank or (1.0 if on_gpu else 0.5)
        requests += [GroupRequest(name, role.gpus_per_node, cpus_per_rank, float(on_gpu))] * role.nodes
    server_group = GroupRequest(SERVER, 1, rollout.cpus_per_server, float(rollout.tensor_parallel * on_gpu))
    return requests + [server_group] * rollout.servers


def check_feasible(requests: list[GroupRequest], nodes: dict[str, dict[str, float]]) -> None:
    """Raise RunError, with what is wanted and what each node has, where the groups can never be placed together.

    `nodes`: name -> total CPU and GPU. The largest group goes first, each to the smallest room that fits; groups of one
    multi-node role go to different nodes.
    """
    left = {name: dict(total) for name, total in nodes.items()}
    used_by_role: dict[str, set[str]] = {}
    unplaced = []
    for request in sorted(requests, key=lambda r: (-r.total["GPU"], -r.total["CPU"])):
        taken = used_by_role.setdefault(request.role, set()) if request.role != SERVER else set()
        fits = [n for n in left if n not in taken and all(left[n].get(k, 0) + 1e-6 >= v for k, v in request.total.items())]
        fits.sort(key=lambda n: (left[n].get("GPU", 0), left[n].get("CPU", 0)))
        if not fits:
            unplaced.append(request)
            continue
        taken.add(fits[0])
        for key, value in request.total.items():
            left[fits[0]][key] = left[fits[0]].get(key, 0) - value
    if unplaced:
        raise RunError(f"the cluster is too small: no node for {unplaced[0]}\n{placement_table(requests, nodes)}")


def placement_table(requests: list[GroupRequest], nodes: dict[str, dict[str, float]]) -> str:
    wanted = [f"  wanted    {request}" for request in requests]
    available = [f"  node {name} has {_amounts(total)}" for name, total in nodes.items()]
    return "\n".join(wanted + available)


def place(requests: list[GroupRequest], timeout_s: float) -> list[PlacementGroup]:
    """Reserve all groups; RunError after `timeout_s`, or at once where they cannot fit. The caller removes them."""
    nodes = {f"{n['NodeName']} ({n['NodeID'][:8]})": n["Resources"] for n in ray.nodes() if n["Alive"]}
    check_feasible(requests, nodes)
    pinned = _distinct_nodes(requests)
    groups = []
    deadline = time.monotonic() + timeout_s
    try:
        for request, node_id in zip(requests, pinned):
            selector = [{"ray.io/node-id": node_id}] * request.num_bundles if node_id else None
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


def _distinct_nodes(requests: list[GroupRequest]) -> list[str | None]:
    """A node id for each group of a role that spans nodes, in node order, since two groups of 4 could otherwise share a
    node of 8 and PACK promises no order; None where Ray may choose."""
    nodes = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: n["NodeID"])
    pinned: list[str | None] = []
    by_role: dict[str, Iterator[str]] = {}
    for request in requests:
        spans = request.role != SERVER and sum(r.role == request.role for r in requests) > 1
        if spans and request.role not in by_role:
            need = request.total
            by_role[request.role] = (
                n["NodeID"] for n in nodes if all(n["Resources"].get(k, 0) >= v for k, v in need.items())
            )
        pinned.append(next(by_role[request.role]) if spans else None)
    return pinned


def _amounts(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU, {resources.get('GPU', 0):g} GPU"
