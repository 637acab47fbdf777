"""`megarl check [CONFIG] [--ray-address ADDRESS]`: is this machine, or this Ray cluster, fit for a run?

Each node says what it is, the nodes reach each other over TCP, and ranks as a role has them meet, sum and exchange tensors.
Every wait has a deadline and names who is late. Nothing outlives the check.
"""

import secrets
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import permutations
from pathlib import Path

import ray
from rich.table import Table

from megarl.cluster.check_node import NodeProbe, NodeReport, model_state, versions
from megarl.cluster.check_ranks import ANSWER_S, START_S, Findings, measure, pinned, start_ranks
from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import Node, group_requests, held_groups, living_nodes, plan_nodes
from megarl.cluster.waiting import wait_all
from megarl.config import Config
from megarl.config_checks import is_toy_model
from megarl.errors import RunError
from megarl.monitor.table import new_table, print_table

CONNECT_S = 5.0  # for one TCP connection
SEEN_S = 15.0  # for a file of one node to be seen by another: file servers keep what they knew for a while
MAX_SKEW_S = 1.0
MIN_SHARED_MEMORY_GB = 1.0  # free; Ray's objects, SGLang's and NCCL's buffers are there
MIN_FREE_SHARE = 0.95  # of a GPU's memory: its driver takes a little
Probes = dict[str, ray.actor.ActorHandle]  # by the name of the node
Report = Callable[[str], None]
ROLES = ("actor", "critic", "teacher", "reward_model", "reward_server")


def check(config: Config, device: str | None, of_run: bool, timeout_s: float, report: Report) -> int:
    """Look at everything, print tables and a verdict; the exit code.

    `device` None: cuda where the cluster has GPUs. `of_run`: the config is one that is to be run, so that its models and
    its room are looked for too. `timeout_s` bounds each step. Raises RunError where there is no Ray to ask.
    """
    findings = Findings()
    cluster = Cluster(config, device or "cuda", Path(), report=report)
    with ExitStack() as stack:
        cluster.start_ray(stack)
        nodes = living_nodes()
        if device is None:
            cluster.device = device = "cuda" if any(node.total.get("GPU") for node in nodes) else "cpu"
        report(f"{len(nodes)} node{'s' * (len(nodes) > 1)}, device {device}")
        for gone in (node for node in ray.nodes() if not node["Alive"]):
            reason = gone.get("DeathReasonMessage") or "Ray knows no reason"
            findings.warnings.append(f"node {gone['NodeName']} ({gone['NodeID'][:8]}) has left the cluster: {reason}")
        probes = start_probes(cluster, nodes, stack)
        reports = ask_nodes(probes, timeout_s, findings)
        probes = {name: probe for name, probe in probes.items() if name in reports}
        skews = clock_skews(probes, timeout_s, findings)
        print_table(nodes_table(reports, skews))
        versions_of = {name: each.versions for name, each in reports.items()}
        compare_versions({"this process": versions()} | versions_of, findings)
        look_at_nodes(reports, nodes, device, findings)
        look_at_files(config, probes, timeout_s, findings, report)
        if of_run:
            look_at_models(config, probes, timeout_s, findings, report)
            look_for_room(config, device, nodes, findings)
        if look_at_network(probes, findings, report):
            ranks = start_ranks(cluster, [node for node in nodes if node.name in probes], stack, findings)
            try:
                measure(ranks, device, timeout_s, findings)
            except RunError as error:
                findings.problems.append(str(error))
    for text in findings.warnings:
        report(f"warning: {text}")
    for text in findings.problems:
        report(f"problem: {text}")
    return verdict(findings, len(nodes), report)


def verdict(findings: Findings, num_nodes: int, report: Report) -> int:
    count = len(findings.problems)
    what = "this node is" if num_nodes == 1 else f"all {num_nodes} nodes are"
    report(f"verdict: {count} problem{'s' * (count > 1)}" if count else f"verdict: {what} fit for a run")
    return 1 if count else 0


def answers(refs: dict[str, ray.ObjectRef], what: str, timeout_s: float, findings: Findings) -> dict:
    """What each answered; those that failed, or did not answer in time, are problems."""
    found: dict = {}
    if not refs:
        return found
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    for name, ref in refs.items():
        if not ray.wait([ref], timeout=0)[0]:
            findings.problems.append(f"{what}: no answer within {timeout_s:g} s from {name}")
            continue
        try:
            (found[name],) = wait_all({name: ref}, what, timeout_s)
        except RunError as error:
            findings.problems.append(str(error))
    return found


# Each node for itself


def start_probes(cluster: Cluster, nodes: list[Node], stack: ExitStack) -> Probes:
    probes = {}
    for node in nodes:
        probes[node.name] = ray.remote(NodeProbe).options(**pinned(cluster, node, {})).remote()
        stack.callback(ray.kill, probes[node.name])
    return probes


def ask_nodes(probes: Probes, timeout_s: float, findings: Findings) -> dict[str, NodeReport]:
    refs = {name: probe.about.remote() for name, probe in probes.items()}
    return answers(refs, "starting a process on the node", max(timeout_s, START_S), findings)


def clock_skews(probes: Probes, timeout_s: float, findings: Findings) -> dict[str, float]:
    """Seconds by which each node's clock is ahead of ours."""
    skews = {}
    for name, probe in probes.items():
        tries = []
        for _ in range(3):
            before = time.time()
            there = answers({name: probe.clock.remote()}, "reading the clock", timeout_s, findings).get(name)
            if there is None:
                break
            after = time.time()
            tries.append((after - before, there - (before + after) / 2))
        if tries:
            skews[name] = min(tries)[1]  # of the fastest answer
            if abs(skews[name]) > MAX_SKEW_S:
                findings.warnings.append(f"the clock of {name} differs by {skews[name]:+.1f} s from this machine's")
    return skews


def compare_versions(versions_of: dict[str, dict[str, str]], findings: Findings) -> None:
    """Each package that is not the same everywhere is a problem, with who has which version."""
    for package in dict.fromkeys(name for found in versions_of.values() for name in found):
        by_version = defaultdict(list)
        for where, found in versions_of.items():
            if package in found or package != "NVIDIA driver":  # a node without GPUs has none
                by_version[found.get(package, "none")].append(where)
        if len(by_version) > 1:
            texts = [f"{version} on {', '.join(where)}" for version, where in by_version.items()]
            findings.problems.append(f"{package} differs: {'; '.join(texts)}")


def look_at_nodes(reports: dict[str, NodeReport], nodes: list[Node], device: str, findings: Findings) -> None:
    in_ray = {node.name: int(node.total.get("GPU", 0)) for node in nodes}
    for name, node in reports.items():
        free, total = node.shared_memory_gb
        if free < MIN_SHARED_MEMORY_GB:
            text = f"{name}: /dev/shm has {free:.2f} of {total:.2f} GB free, wanted {MIN_SHARED_MEMORY_GB:g} or more; "
            findings.problems.append(text + "a container has what --shm-size gives it")
        if device == "cpu":
            continue
        if len(node.gpus) != in_ray[name]:
            text = f"{name}: its driver has {len(node.gpus)} GPUs, but Ray counts {in_ray[name]} there"
            findings.warnings.append(f"{text} (CUDA_VISIBLE_DEVICES or --num-gpus at `ray start`)")
        for gpu in node.gpus:
            if gpu.free_gb < MIN_FREE_SHARE * gpu.total_gb:
                taken = f"{gpu.total_gb - gpu.free_gb:.1f} of {gpu.total_gb:.1f} GB are taken"
                who = ", ".join(gpu.holders) or "nobody whom the driver names"
                findings.warnings.append(f"{name} GPU {gpu.index} ({gpu.name}): {taken} by {who}")


def nodes_table(reports: dict[str, NodeReport], skews: dict[str, float]) -> Table:
    table = new_table("", "node", "address", "CPUs", "memory free", "/dev/shm free", "GPUs", "free GPU memory", "clock")
    for name, node in reports.items():
        free = f"{min(gpu.free_gb for gpu in node.gpus):.1f} GB or more" if node.gpus else "-"
        amounts = [f"{pair[0]:.1f} of {pair[1]:.1f} GB" for pair in (node.memory_gb, node.shared_memory_gb)]
        gpus = f"{len(node.gpus)} {node.gpus[0].name}" if node.gpus else "0"
        clock = f"{skews[name] * 1000:+.0f} ms" if name in skews else "-"
        table.add_row(name, node.address, str(node.cpus), *amounts, gpus, free, clock)
    return table


def look_at_files(config: Config, probes: Probes, timeout_s: float, findings: Findings, report: Report) -> None:
    """The run directory is the same folder on all nodes."""
    folder = Path(config.run_directory).resolve()
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    marker, content = f".megarl-check-{secrets.token_hex(4)}", secrets.token_hex(16)
    names = {node: f"{marker}-{index}" for index, node in enumerate(probes)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / marker).write_text(content)
        visits = {n: probe.visit.remote(str(folder), marker, content, names[n]) for n, probe in probes.items()}
        said = answers(visits, f"looking into {folder}", timeout_s, findings)
        for node, why in said.items():
            if why:
                findings.problems.append(f"{node} does not share the run directory {folder}: {why}")
            elif not _seen(folder / names[node], content):
                findings.problems.append(f"{node} wrote into {folder}; this machine does not see it in {SEEN_S:g} s")
        if said and not any(said.values()):
            report(f"run directory: {folder} is {'shared and ' * (len(said) > 1)}writable")
    except OSError as error:
        findings.problems.append(f"run_directory: {folder} cannot be written: {error.strerror}")
    finally:
        with suppress(OSError):  # nothing was made, or somebody uses it by now
            for name in (marker, *names.values()):
                (folder / name).unlink(missing_ok=True)
            for path in made:
                path.rmdir()


def look_at_models(config: Config, probes: Probes, timeout_s: float, findings: Findings, report: Report) -> None:
    """Every node has the models of the run, and they are the same."""
    paths = {config.model_of(role).path for role in ROLES}
    for path in sorted(path for path in paths if not is_toy_model(config, path)):
        folder = Path(path).resolve()
        here = model_state(folder)
        refs = {node: probe.model_state.remote(str(folder)) for node, probe in probes.items()}
        said = answers(refs, f"looking at {folder}", timeout_s, findings)
        others = [f"{node}: {state}" for node, state in said.items() if state != here]
        if others:
            findings.problems.append(f"the model {folder} differs: here {here}; {'; '.join(others)}")
        else:
            report(f"model: {folder}: {here}")


def _seen(file: Path, content: str) -> bool:
    deadline = time.monotonic() + SEEN_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if file.read_text() == content:
                return True
        time.sleep(0.1)
    return False


def look_for_room(config: Config, device: str, nodes: list[Node], findings: Findings) -> None:
    """Whether all roles of the run can be placed: ever, and now."""
    requests = group_requests(config, device)
    try:
        plan_nodes(requests, nodes)
    except RunError as error:
        findings.problems.append(str(error))
        return
    try:
        plan_nodes(requests, nodes, free=True)
    except RunError as error:
        held = ", ".join(held_groups()) or "no placement group"
        findings.warnings.append(f"now there is no room for the run, held by {held}: {error}")


# The nodes together


def look_at_network(probes: Probes, findings: Findings, report: Report) -> bool:
    """Whether each node reaches each other one over TCP, on a port that the other one chose."""
    if len(probes) < 2:
        return bool(probes)
    places = answers({n: probe.listen.remote() for n, probe in probes.items()}, "listening", ANSWER_S, findings)
    others = {a: {b: place for b, place in places.items() if b != a} for a in places}
    refs = {name: probes[name].reach.remote(others[name], CONNECT_S) for name in places}
    found = answers(refs, "connecting", CONNECT_S * len(probes) + ANSWER_S, findings)
    failed = False
    for a, b in permutations(places, 2):
        if isinstance(why := found.get(a, {}).get(b, "no answer"), str):
            failed = True
            address, port = places[b]
            text = f"{a} cannot reach {b} at {address}, port {port}: {why}"
            findings.problems.append(f"{text}; ranks use free ports, so a firewall must let all of them through")
    if failed or len(found) < len(probes):
        return False
    slowest, a, b = max((found[a][b], a, b) for a, b in permutations(places, 2))
    report(f"network: every node reaches every other one; slowest {slowest:.1f} ms, {a} to {b}")
    return True
