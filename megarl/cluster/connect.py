"""Into a Ray cluster, or into one of our own: with an error in seconds where there is none."""

import socket

import ray
from ray.exceptions import RayError

from megarl.errors import RunError

REACH_S = 10.0  # Ray itself would try for many minutes, in silence


def connect(address: str | None, key: str, **options) -> None:
    """`ray.init`; `address` None starts a cluster on this machine. Raises RunError naming `key`, which gave the address."""
    if address not in (None, "auto"):
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, ValueError) as error:
            raise RunError(f"{key}: nothing answers at {address}: {error}") from error
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **options)
    except SystemExit as error:  # Ray's own answer to a SIGTERM that comes meanwhile
        raise KeyboardInterrupt from error
    except (OSError, RuntimeError, ValueError, RayError) as error:
        where = f"{key}: cannot use Ray at {address}" if address else "cannot start Ray on this machine"
        raise RunError(f"{where}: {error}") from error
