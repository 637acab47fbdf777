"""The part of `megarl check` in which ranks meet, sum and exchange tensors, as those of a role do."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.table import Table

from megarl.cluster.check_node import RankProbe
from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import Node, held_groups
from megarl.cluster.waiting import wait_all, who_is_gone
from megarl.errors import RunError
from megarl.monitor.table import new_table, print_table

ANSWER_S = 5.0  # for a rank that does not hang to say so
START_S = 120.0  # for a process to start or to import torch, at least: many may read it from one file server
REPEATS = 5
NUM_BYTES = {"cpu": 2**24, "cuda": 2**28}
SLOW_SHARE = 0.5  # a pair below this share of the median pair is slow


@dataclass
class Findings:
    problems: list[str] = field(default_factory=list)  # with any of them a run would fail
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rank:
    name: str  # "rank 3 on NODE"
    node: str
    handle: ray.actor.ActorHandle


def pinned(cluster: Cluster, node: Node, environment: dict[str, str], num_gpus: int = 0) -> dict:
    """Ray options of an actor that may run on this node alone, and takes no CPU of a run's."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if cluster.device == "cpu" else {}
    return {
        "num_cpus": 0,
        "num_gpus": num_gpus,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        "runtime_env": {"env_vars": hidden | environment | cluster.tag.variables},
    }


def start_ranks(cluster: Cluster, nodes: list[Node], stack: ExitStack, findings: Findings) -> list[Rank]:
    """One on each GPU that is free; on CPU one per node, or two where there is one node."""
    ranks: list[Rank] = []
    per_node = 2 if len(nodes) == 1 else 1
    for node in nodes:
        on_gpu = cluster.device == "cuda"
        count = int(node.free.get("GPU", 0)) if on_gpu else per_node
        if on_gpu and count < node.total.get("GPU", 0):
            text = f"{node.name}: {count} of {node.total['GPU']:g} GPUs are free in Ray; the others are not tried"
            findings.warnings.append(f"{text}; held by {', '.join(held_groups()) or 'no placement group'}")
        for _ in range(count):
            options = pinned(cluster, node, cluster.rank_environment(), int(on_gpu))
            # What it prints stays in Ray's log of the process. The second thread is for `alive`.
            handle = ray.remote(RankProbe).options(**options, max_concurrency=2).remote(len(ranks), "/dev/stdout", None)
            stack.callback(ray.kill, handle)
            ranks.append(Rank(f"rank {len(ranks)} on {node.name}", node.name, handle))
    return ranks


def together(ranks: list[Rank], what: str, timeout_s: float, method: str, *arguments) -> list:
    """What a method of `RankProbe` returns on all of them. Raises RunError naming who failed or was late; of a wait, those
    who hang or died alone, and not those who wait for them."""
    start = time.monotonic()
    try:
        refs = {rank.name: getattr(rank.handle, method).remote(*arguments) for rank in ranks}
        return wait_all(refs, what, timeout_s, "--timeout")
    except RunError as error:
        if time.monotonic() < start + timeout_s:
            raise
        gone = who_is_gone({rank.name: rank.handle.alive.remote() for rank in ranks}, ANSWER_S)
        if gone:
            who = ", ".join(f"{name} {how}" for name, how in gone.items())
            raise RunError(f"{what}: {who}; the others waited {timeout_s:g} s for it (--timeout)") from error
        raise RunError(f"{error}; their processes answer, so it is the network between them") from error


def measure(ranks: list[Rank], device: str, timeout_s: float, findings: Findings) -> None:
    """Rendezvous, collectives and exchanges, and a table of their speed. Raises RunError at the first failure."""
    size, num_bytes = len(ranks), NUM_BYTES[device]
    if not ranks:
        findings.warnings.append("no GPU is free: nothing is measured")
        return
    late_s = 2 * timeout_s  # a rank waits longer than we do, who can tell for whom
    together(ranks, "importing torch", max(timeout_s, START_S), "load")
    ((address, port),) = together(ranks[:1], "finding a port", timeout_s, "address")
    together(ranks, f"meeting at {address}, port {port}", timeout_s, "meet", address, port, size, late_s)
    start = time.monotonic()
    together(ranks, f"joining {size} ranks", timeout_s, "join", size, late_s)
    table = new_table("", "step", "ranks", "time", "GB/s")
    table.add_row("rendezvous and first sum", str(size), f"{time.monotonic() - start:.2f} s", "-")
    if size > 1:
        measure_speed(ranks, num_bytes, timeout_s, table, findings)
    print_table(table)


def measure_speed(ranks: list[Rank], num_bytes: int, timeout_s: float, table: Table, findings: Findings) -> None:
    """Rows of the table: collectives of all ranks, and exchanges of pairs."""
    size = len(ranks)
    # Of an all-reduce: what goes over each rank's link, as NCCL's own tests count it.
    for name, method, share in (("all-reduce", "all_reduce", 2 * (size - 1) / size), ("broadcast", "broadcast", 1.0)):
        what = f"{name} of {num_bytes >> 20} MiB"
        times = together(ranks, what, timeout_s, method, num_bytes, REPEATS)
        speed = share * num_bytes / max(times) / 1e9
        table.add_row(what, str(size), f"{max(times) * 1000:.1f} ms", f"{speed:.2f}")
    speeds = exchange_in_pairs(ranks, num_bytes, timeout_s)
    for kind, of_kind in speeds.items():
        text = f"{statistics.median(of_kind.values()):.2f}"
        text += f", slowest {min(of_kind.values()):.2f}" if len(of_kind) > 1 else ""
        table.add_row(f"{len(of_kind)} pair{'s' * (len(of_kind) > 1)} {kind}, {num_bytes >> 20} MiB", "2", "-", text)
    findings.warnings += slow_pairs(speeds)


def exchange_in_pairs(ranks: list[Rank], num_bytes: int, timeout_s: float) -> dict[str, dict[str, float]]:
    """GB/s in one direction: by kind of pair, then by pair."""
    speeds: dict[str, dict[str, float]] = defaultdict(dict)
    what = f"exchanging {num_bytes >> 20} MiB in pairs"
    for pairs in rounds(ranks):
        peers = {ranks.index(a): ranks.index(b) for pair in pairs for a, b in (pair, pair[::-1])}
        both = [ranks[number] for number in peers]
        times = together(both, what, timeout_s, "exchange", peers, num_bytes, REPEATS)
        seconds = {rank.name: each for rank, each in zip(both, times)}
        for a, b in pairs:
            kind = "inside a node" if a.node == b.node else "between nodes"
            speeds[kind][f"{a.name} and {b.name}"] = 2 * num_bytes / seconds[a.name] / 1e9
    return speeds


def rounds(ranks: list[Rank]) -> Iterator[list[tuple[Rank, Rank]]]:
    """Pairs that may exchange at the same time: all pairs inside each node, then all pairs of nodes by their first ranks."""
    by_node: dict[str, list[Rank]] = defaultdict(list)
    for rank in ranks:
        by_node[rank.node].append(rank)
    tournaments = [list(tournament(of_node)) for of_node in by_node.values()]
    for index in range(max(map(len, tournaments), default=0)):
        yield [pair for of_node in tournaments if index < len(of_node) for pair in of_node[index]]
    yield from tournament([of_node[0] for of_node in by_node.values()])


def tournament(players: list) -> Iterator[list[tuple]]:
    """Rounds in which each meets at most one other, until each has met each: the circle method."""
    circle = [*players, None] if len(players) % 2 else list(players)
    half = len(circle) // 2
    for _ in range(len(circle) - 1 if len(players) > 1 else 0):
        pairs = zip(circle[:half], reversed(circle[half:]))
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def slow_pairs(speeds: dict[str, dict[str, float]]) -> list[str]:
    """Of three pairs or more of a kind (GB/s by pair), those far below the median."""
    found = []
    for kind, of_kind in speeds.items():
        median = statistics.median(of_kind.values())
        for pair, speed in of_kind.items():
            if len(of_kind) > 2 and speed < SLOW_SHARE * median:
                found.append(f"slow: {pair}, {speed:.2f} GB/s where the median {kind} is {median:.2f}")
    return found
