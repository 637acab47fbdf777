"""Child entry point of one SGLang server: `python -m megarl.rollout.launch PARENT_PID -- <sglang arguments>`.

Nothing of a server may outlive the process that supervises it, SIGKILL included, so every process asks the kernel to
be killed when its parent dies. SGLang's scheduler and detokenizer ask too, but only after half a minute of imports.
They are started by `spawn`, which imports this module first under the name `__mp_main__`: that closes the gap.
Keep the top of this module free of heavy imports.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_VARIABLE = "MEGARL_SERVER_PARENT"  # pid of the process that starts SGLang's children


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; exit at once if that has already happened.

    The signal comes when the *thread* that started this process ends: start servers from a long-lived one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"megarl.rollout.launch: parent {parent_pid} is gone, process {os.getpid()} ends")
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def main(argv: list[str]) -> None:
    if len(argv) < 2 or not argv[0].isdigit() or argv[1] != "--":
        sys.exit("usage: python -m megarl.rollout.launch PARENT_PID -- <sglang arguments>")
    die_with_parent(int(argv[0]))

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(argv[2:])
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]))

if __name__ == "__main__":
    main(sys.argv[1:])
