"""debug.sync_checksum: is every tensor of every server what was pushed, bit for bit? By SGLang's own weights_checker.

The servers' weights are overwritten with noise and pushed once more: each tensor must come back as it was. That shows what
a canary cannot see, such as an expert that no token is sent to or the row of a token that does not occur.
"""

from collections.abc import Callable

from megarl.errors import RunError
from megarl.rollout.client import RolloutClient

TIMEOUT_S = 600.0  # of one look at all tensors: about half a second for a GB
SHOWN = 10  # tensors in an error


def verify(client: RolloutClient, push: Callable[[], object], what: str) -> None:
    """Raises RunError naming the servers and the tensors that another `push` changes, or that are not the same on all servers.
    `what` says where the present weights are from."""
    before = client.checksums(TIMEOUT_S)
    first, *others = before
    for other in others:
        refuse(different(before[first], before[other]), f"{first} and {other} hold different weights after {what}")
    client.overwrite_weights(TIMEOUT_S)
    push()
    compare(client, before, what)


def compare(client: RolloutClient, before: dict[str, dict[str, str]], what: str) -> None:
    """Raises RunError where a server's tensors are no longer those of `before`, which are from `what`."""
    for url, checksums in client.checksums(TIMEOUT_S).items():
        refuse(
            different(before.get(url, checksums), checksums),
            f"{url} holds other weights after a push than after {what}",
        )


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """The names whose checksums differ or are on one side only."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def refuse(names: list[str], text: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise RunError(f"debug.sync_checksum: {text}: {', '.join(names[:SHOWN])}{more}")
