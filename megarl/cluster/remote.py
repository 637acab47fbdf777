"""A Ray cluster over machines that are reached by ssh: `python -m megarl.cluster.remote`, called by launch/ray_cluster.sh.

`start` runs `node` on each machine, which leaves a `daemon` there: a node of the cluster until `stop` ends it. Ray is
imported there alone.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import psutil

from megarl.cli import exit_code
from megarl.cluster.token_file import write_token
from megarl.errors import ConfigError, RunError

ROOT = Path(__file__).resolve().parents[2]
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
FORWARDED = ("NCCL_", "GLOO_")  # variables that ssh would leave behind
FIRST_PORT = 6379
END_S = 60.0  # for a node to end; longer than all of its own waits
SSH_S = 30.0  # besides what is done at the other end
POLL_S = 1.0


def main(arguments: list[str]) -> int:
    options = parse(arguments)

    def run() -> int:
        COMMANDS[options.command](options)
        return 0

    return exit_code(run)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ray_cluster.sh", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="start|stop|address")
    start_parser = commands.add_parser("start", help="a cluster over these machines", allow_abbrev=False)
    start_parser.add_argument("--nodes", required=True, metavar="HOST,HOST", help="for ssh; the first is the head")
    start_parser.add_argument("--python", default=sys.executable, help="on all of them; default: this one")
    stop_parser = commands.add_parser("stop", help="end it", allow_abbrev=False)
    address_parser = commands.add_parser("address", help="what lets a shell into it", allow_abbrev=False)
    for command in (start_parser, stop_parser, address_parser):
        text = "where the cluster and its token are noted; default: ~/.megarl/ray_cluster"
        folder = Path.home() / ".megarl/ray_cluster"
        command.add_argument("--state", type=Path, default=folder, metavar="FOLDER", help=text)
    node_parsers = [start_parser]
    for name in ("node", "daemon", "end"):  # at the other end
        command = commands.add_parser(name)
        command.add_argument("--name", required=True)
        command.add_argument("--id", required=True)
        if name != "end":
            node_parsers.append(command)
            command.add_argument("--address", help="of the head; default: this is the head")
    for command in node_parsers:
        command.add_argument("--head-address", metavar="IP", help="of the head; default: what Ray finds")
        command.add_argument("--port", type=int, help=f"of the head; default: a free one from {FIRST_PORT} on")
        command.add_argument("--dashboard-port", type=int, help="serve `ray job submit` on the head; default: do not")
        command.add_argument("--num-cpus", type=int, help="of a node; default: what Ray finds")
        command.add_argument("--num-gpus", type=int, help="of a node; default: what Ray finds")
        command.add_argument("--timeout-s", type=float, default=120.0, help="for a node to join; default: 120")
    return parser.parse_args(arguments)


# On the machine where launch/ray_cluster.sh is called


def start(options: argparse.Namespace) -> None:
    """Start all nodes, or none. Raises ConfigError where there is a cluster, RunError naming all nodes that failed."""
    nodes = options.nodes.split(",")
    if "" in nodes or len(set(nodes)) < len(nodes):
        raise ConfigError(f"--nodes: given {options.nodes!r}, wanted different hosts with commas between them")
    try:
        options.state.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        text = f"--state: {options.state} has a cluster already: end it (launch/ray_cluster.sh stop), or choose another folder"
        raise ConfigError(text) from None
    cluster = {"id": secrets.token_hex(4), "nodes": nodes, "python": options.python}
    token = secrets.token_hex(32)
    try:
        write_token(options.state, token)
        given = {"port": options.port, "dashboard-port": options.dashboard_port, "head-address": options.head_address}
        common = {"num-cpus": options.num_cpus, "num-gpus": options.num_gpus, "timeout-s": options.timeout_s}
        tell(f"starting the head of a Ray cluster on {nodes[0]}")
        limit_s = options.timeout_s + SSH_S
        cluster |= on_all(cluster, nodes[:1], "node", common | given, limit_s, token)[0]
        tell(f"{nodes[0]}: {cluster['address']}; starting {len(nodes) - 1} more")
        on_all(cluster, nodes[1:], "node", common | {"address": cluster["address"]}, limit_s, token)
        (options.state / "cluster.json").write_text(json.dumps(cluster) + "\n")
    except BaseException:
        with contextlib.suppress(RunError):  # of nodes that could not be reached before: that is told
            on_all(cluster, nodes, "end", {}, END_S + SSH_S)
        shutil.rmtree(options.state)
        raise
    tell(f"{len(nodes)} nodes are in the Ray cluster: {', '.join(nodes)}")
    address(options)


def stop(options: argparse.Namespace) -> None:
    """Raises RunError naming all nodes that could not be ended; the cluster stays noted then."""
    cluster = read(options)
    try:
        on_all(cluster, cluster["nodes"], "end", {}, END_S + SSH_S)
    except RunError as error:
        text = f"{error}\nthe others are ended: call stop again, or remove {options.state} if these are gone"
        raise RunError(text) from error
    shutil.rmtree(options.state)
    tell(f"ended the Ray cluster on {', '.join(cluster['nodes'])}")


def address(options: argparse.Namespace) -> None:
    """Print what lets `megarl train --ray-address auto`, and Ray's own commands, into the cluster, for a shell to eval."""
    variables = {"RAY_ADDRESS": read(options)["address"], "RAY_AUTH_MODE": "token"}
    variables["RAY_AUTH_TOKEN_PATH"] = shlex.quote(str((options.state / "token").resolve()))
    print("export " + " ".join(f"{name}={value}" for name, value in variables.items()))
    tell(f"on a node of it: megarl train CONFIG device=cuda --ray-address {variables['RAY_ADDRESS']}")


def read(options: argparse.Namespace) -> dict:
    try:
        return json.loads((options.state / "cluster.json").read_text())
    except OSError as error:
        raise ConfigError(f"--state: {options.state} has no cluster: {error.strerror}") from error


def on_all(cluster: dict, nodes: list[str], command: str, given: dict, timeout_s: float, token: str = "") -> list[dict]:
    """What a command answers on all nodes, at the same time. Raises RunError with all that went wrong, by node."""
    options = [f"--{key}={value}" for key, value in given.items() if value is not None]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(nodes))) as pool:
        calls = [pool.submit(on, node, cluster, [command, *options], timeout_s, token) for node in nodes]
        errors = [str(error) for call in calls if (error := call.exception())]
    if errors:
        raise RunError("\n".join(errors))
    return [call.result() for call in calls]


def on(node: str, cluster: dict, arguments: list[str], timeout_s: float, token: str) -> dict:
    """Call this module on a node, by ssh but for this machine itself."""
    forwarded = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(FORWARDED)]
    command = ["env", *forwarded, cluster["python"], "-m", __spec__.name, *arguments]
    command += [f"--name={node}", f"--id={cluster['id']}"]
    line = f"cd {shlex.quote(str(ROOT))} && {shlex.join(command)}"
    there = ("sh", "-c") if node in ("localhost", socket.gethostname()) else (*SSH, node, "--")
    try:
        done = subprocess.run([*there, line], input=f"{token}\n", capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RunError(f"{node}: no answer within {timeout_s:g} s (--timeout-s and {SSH_S:g} s for ssh)") from None
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("megarl: error: ").removeprefix(f"{node}: ")
        raise RunError(f"{node}: {said or f'{there[0]} ended with exit code {done.returncode}'}")
    return json.loads(done.stdout)


def tell(text: str) -> None:
    print(f"megarl: {text}", file=sys.stderr, flush=True)


# On a node


def node(options: argparse.Namespace) -> None:
    """Leave a daemon behind once its Ray has started, and print where the cluster's head is."""
    daemon = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, "daemon", *sys.argv[2:]],
        stdin=sys.stdin,  # the token
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # else ssh would wait for its end
        start_new_session=True,
        text=True,
    )
    report = json.loads(daemon.stdout.readline() or f'{{"error": "the daemon ended with exit code {daemon.wait()}"}}')
    if "error" in report:
        raise RunError(report["error"])
    print(json.dumps(report))


def daemon(options: argparse.Namespace) -> None:
    """Be a node of the cluster until SIGTERM, or until the cluster has no head."""
    import ray

    from megarl.cluster.node import Head, pick_port, ray_node

    token = sys.stdin.readline().strip()
    address = options.address
    try:
        if not address:
            port = options.port or pick_port(FIRST_PORT)
            address = f"{options.head_address or ray.util.get_node_ip_address()}:{port}"
        with ray_node(
            name=options.name,
            run_id=run_id(options),
            address=address,
            is_head=not options.address,
            token=token,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            timeout_s=options.timeout_s,
            dashboard_port=options.dashboard_port,
        ) as ray_of_this_node:
            print(json.dumps({"address": address}), flush=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            head = Head(address)
            while not head.is_gone():
                ray_of_this_node.check()
                time.sleep(POLL_S)
    except RunError as error:
        print(json.dumps({"error": str(error)}), flush=True)


def end(options: argparse.Namespace) -> None:
    """End the daemon of this node, and what it may have left."""
    from megarl.cluster.clean import clean_folders, clean_processes, tagged_folders

    words = {"daemon", f"--name={options.name}", f"--id={options.id}"}
    daemons = [process for process in psutil.process_iter(["cmdline"]) if words <= set(process.info["cmdline"] or ())]
    for process in daemons:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, left = psutil.wait_procs(daemons, END_S)
    for process in left:
        process.kill()
    tags = {tag for tag in tagged_folders().values() if tag.run_id == run_id(options)}
    for what in chain(clean_processes(tags, dry_run=False), clean_folders(tags, dry_run=False)):
        tell(f"{options.name}: removed {what}")
    print("{}")


def run_id(options: argparse.Namespace) -> str:
    name = re.sub(r"[^\w.-]", "_", options.name)
    return f"megarl-ray.{name}-{options.id}"


COMMANDS = {"start": start, "stop": stop, "address": address, "node": node, "daemon": daemon, "end": end}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
