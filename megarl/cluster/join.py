"""Wait until all nodes of a Ray cluster are there: `python -m megarl.cluster.join ADDRESS NODE,NODE TIMEOUT_S`.

For whoever has the cluster's token in the environment. Names are those that the nodes were started with.
"""

import sys
import time

import ray

from megarl.cluster.connect import connect
from megarl.errors import RunError

POLL_S = 0.5
PROGRESS_S = 10.0  # between lines that say who is missing


def wait_for_nodes(address: str, names: list[str], timeout_s: float) -> None:
    """Raises RunError naming the nodes that have not joined within `timeout_s`, and who has."""
    start, lines = time.monotonic(), 0
    connect(address, "the Ray cluster", namespace="megarl-join")
    try:
        while True:
            joined = {node["NodeName"] for node in ray.nodes() if node["Alive"]}
            missing, passed_s = [name for name in names if name not in joined], time.monotonic() - start
            if not missing:
                return
            if passed_s >= timeout_s:
                text = f"{len(missing)} of {len(names)} nodes have not joined the Ray cluster within {timeout_s:g} s: "
                there = ", ".join(sorted(joined.intersection(names)))
                raise RunError(f"{text}{', '.join(missing)} (there are: {there}); what was said there is above")
            if passed_s >= (lines + 1) * PROGRESS_S:
                lines += 1
                waited = f"{passed_s:.0f} of {timeout_s:g} s"
                print(f"megarl: waiting for nodes to join, {waited}: {', '.join(missing)}", flush=True)
            time.sleep(POLL_S)
    finally:
        ray.shutdown()


def main(address: str, names: str, timeout_s: str) -> int:
    try:
        wait_for_nodes(address, names.split(","), float(timeout_s))
    except RunError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
