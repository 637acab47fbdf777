"""Docker's health check of the image: megarl and Ray import, and where a node of a Ray cluster runs in this container, be
it a run's own or that of `ray start`, the cluster's head answers. A run that hangs is ended by its own deadlines."""

import os
import sys
import threading

from ray._private.services import find_gcs_addresses
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError

import megarl

ANSWER_S = 15.0


def ask(address: str, answered: threading.Event) -> None:
    try:
        GcsClient(address=address)
    except AuthenticationError:
        pass  # to be refused is to be answered
    answered.set()


for address in find_gcs_addresses():
    answered = threading.Event()
    threading.Thread(target=ask, args=(address, answered), daemon=True).start()  # stuck in C++, it hears no signal
    if not answered.wait(ANSWER_S):
        print(f"megarl: the head of the Ray cluster at {address} does not answer", file=sys.stderr, flush=True)
        os._exit(1)
print(f"megarl {megarl.__version__}: healthy", flush=True)
os._exit(0)
