"""A run over two Ray nodes. Where `ip netns` is allowed each is in a network namespace of its own, as on two machines:
nothing but the address that Ray knows of a node leads to it. Elsewhere the two share this machine's network."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
from end_to_end import ROOT, TAG, Run, steps, tagged_processes, wait_until

from megarl.rollout.server import free_port

QUICKSTART = str(ROOT / "configs/quickstart.yaml")
START_S, ENDS_S, NODE_S = 300, 150, 60
CPUS = (3, 1)  # of the two nodes
ONE_RANK_EACH = ("roles.actor.nodes=2", "roles.actor.gpus_per_node=1", "roles.actor.tensor_parallel=1")
RAY_START = """
import os, signal, sys
from megarl.rollout.launch import die_with_parent
die_with_parent(os.getppid(), signal.SIGTERM)
from ray.scripts.scripts import cli
cli(["start", "--block", *sys.argv[1:]])
"""
LEFT = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
groups = {group["state"] for group in ray.util.placement_group_table().values()}
print(json.dumps({"groups": list(groups), "free_cpus": ray.available_resources()["CPU"]}))
"""


class Place(NamedTuple):
    """Where a node runs."""

    address: str
    inside: tuple[str, ...]  # a command that runs the command after it there


class Nodes(NamedTuple):
    ray_address: str
    inside: tuple[str, ...]  # the first node's
    tags: list[str]

    def workers(self, name: str) -> list[list[str]]:
        """For each node the logs of its living processes whose name contains `name`, without suffix: a rank's own."""
        found = []
        for tag in self.tags:
            logs = []
            for pid in (pid for pid, command in tagged_processes(tag).items() if name in command):
                with contextlib.suppress(FileNotFoundError):  # ended in between
                    logs.append(Path(os.readlink(f"/proc/{pid}/fd/1")).stem)
            found.append(sorted(logs))
        return found


@contextlib.contextmanager
def two_places() -> Iterator[list[Place]]:
    names = [f"megarl-{os.getpid()}-{i}" for i in range(2)]
    addresses = ["10.213.0.1", "10.213.0.2"]
    wire = ["ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1]]
    commands = [["ip", "netns", "add", name] for name in names] + [wire]
    for name, address in zip(names, addresses):
        commands += [
            ["ip", "-n", name, "address", "add", f"{address}/30", "dev", "wire"],
            ["ip", "-n", name, "link", "set", "wire", "up"],
            ["ip", "-n", name, "link", "set", "lo", "up"],
        ]
    try:
        allowed = shutil.which("ip") and all(subprocess.run(c, capture_output=True).returncode == 0 for c in commands)
        here = ray.util.get_node_ip_address()
        yield [
            Place(address, ("ip", "netns", "exec", name)) if allowed else Place(here, ())
            for name, address in zip(names, addresses)
        ]
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture(scope="module")
def nodes():
    """Two Ray nodes with a token of their own, which end with the test."""
    tags = [uuid.uuid4().hex for _ in CPUS]
    with (
        pytest.MonkeyPatch.context() as patch,
        two_places() as places,
        # Sockets' paths must stay under 107 characters, and pytest's folders are long.
        tempfile.TemporaryDirectory(prefix="megarl-nodes-", dir="/tmp") as folder,
    ):
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        port = free_port("")
        ray_address = f"{places[0].address}:{port}"
        head = ("--head", f"--port={port}", f"--ray-client-server-port={free_port('')}", "--include-dashboard=false")
        started = []
        try:
            for i, role in enumerate((head, (f"--address={ray_address}",))):
                started.append(start_node(Path(folder), f"node-{i}", places[i], tags[i], CPUS[i], role))
            yield Nodes(ray_address, places[0].inside, tags)
        finally:
            for node in reversed(started):
                node.send_signal(signal.SIGTERM)
            ended = wait_until(lambda: all(node.poll() is not None for node in started), NODE_S)
            left = [process for tag in tags for process in tagged_processes(tag).items()]
            for pid, _ in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for node in started:
                node.wait()
    assert ended and not left, f"processes outlived their Ray node: {left}"


def start_node(folder: Path, name: str, place: Place, tag: str, cpus: int, role: tuple[str, ...]) -> subprocess.Popen:
    output = folder / f"{name}.txt"
    options = [
        f"--node-name={name}",
        f"--node-ip-address={place.address}",
        f"--num-cpus={cpus}",
        "--num-gpus=0",
        f"--object-store-memory={2**27}",
        f"--temp-dir={folder / name}",
        "--min-worker-port=0",  # any free one: two nodes may share this machine's ports
        "--max-worker-port=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
    ]
    with open(output, "wb") as file:
        node = subprocess.Popen(
            [*place.inside, sys.executable, "-c", RAY_START, *role, *options],
            env=os.environ | {TAG: tag, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    up = wait_until(lambda: node.poll() is not None or "Ray runtime started" in output.read_text(), NODE_S)
    assert up and node.poll() is None, output.read_text()
    return node


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout, ranks, servers",
    [
        pytest.param(
            ("roles.actor.cpus_per_rank=1.5",),
            [["actor-0", "actor-1"], []],
            [[], ["server-0"]],
            id="actor on one, server on the other",
        ),
        pytest.param(
            (*ONE_RANK_EACH, "roles.actor.cpus_per_rank=1"),
            [["actor-0"], ["actor-1"]],
            [["server-0"], []],
            id="actor on both",
        ),
    ],
)
def test_a_run_over_two_nodes_trains_syncs_and_leaves_nothing_in_the_cluster(tmp_path, nodes, layout, ranks, servers):
    overrides = [f"cluster.ray_address={nodes.ray_address}", "name=test", "trainer.steps=3", *layout]
    overrides += ["warm_start.steps=50", "data.validation=null", "cluster.call_timeout_s=60", "sync.timeout_s=60"]
    with Run(tmp_path, QUICKSTART, *overrides, inside=nodes.inside) as run:

        def placed() -> bool:
            return nodes.workers("EngineWorker") == ranks and nodes.workers("sglang::scheduler") == servers

        assert wait_until(lambda: run.process.poll() is not None or placed(), START_S), run.output
        assert run.process.poll() is None, run.output
        assert run.wait(ENDS_S) == 0, run.output
        found = steps(tmp_path / "runs/test")
        assert len(found) == 3 and found[-1]["kl/ref"] > 0, found
        assert all(metrics["rollout/logprob_diff_mean"] < 1e-5 for metrics in found), found
        for name in ("EngineWorker", "ServerWorker", "sglang"):
            assert wait_until(lambda: nodes.workers(name) == [[], []], NODE_S), (name, nodes.workers(name))
        command = [*nodes.inside, sys.executable, "-c", LEFT, nodes.ray_address]
        left = subprocess.run(command, capture_output=True, text=True, timeout=NODE_S)
        assert json.loads(left.stdout) == {"groups": ["REMOVED"], "free_cpus": sum(CPUS)}, left
