"""Child entry point of the reward `math`: `python -m megarl.rewards.math_child CONNECTION`.

Takes [gold, answer] and says first whether the gold can be read, then whether they are equal; as JSON. Its stdin is a
pipe that nobody writes to: it is closed when the process that started this one ends.
"""

import fcntl
import functools
import json
import logging
import os
import resource
import select
import signal
import sys
from multiprocessing.connection import Connection

MEMORY_BYTES = 2 * 2**30  # of address space: sympy with all that it imports takes a fifth of it


def main(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's matter
    die_with_writer(sys.stdin.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
    from math_verify import LatexExtractionConfig, parse, verify

    # Its own time limits are made of signals, which work in a main thread only and do not end a call into C.
    box = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = functools.lru_cache(lambda text: parse(rf"\boxed{{{text}}}", box, parsing_timeout=None))
    send(connection, True)
    while True:
        try:
            gold, answer = json.loads(connection.recv_bytes())
        except EOFError:
            return
        is_readable = any(not isinstance(value, str) for value in parsed(gold))  # it falls back to the text itself
        send(connection, is_readable)
        if is_readable:
            send(connection, verify(parsed(gold), parsed(answer), timeout_seconds=None))


def send(connection: Connection, value: bool) -> None:
    connection.send_bytes(json.dumps(value).encode())


def die_with_writer(pipe: int) -> None:
    """Have the kernel kill this process when the other end of the pipe is closed, in the middle of a C call too.

    PR_SET_PDEATHSIG would do so when the *thread* that started this process ends, and a reward may run in any thread.
    """
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        sys.exit("megarl.rewards.math_child: the parent is gone")


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
