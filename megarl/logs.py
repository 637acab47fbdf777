"""The end of a process's log, for the error message that tells of its end."""

import re
from pathlib import Path

END_BYTES = 2**16  # enough for the last lines and the error above them


def log_end(path: Path, node: str) -> str:
    """Where the log of a process on `node` is, and its last lines where this machine sees the file."""
    if not path.exists():
        return f"log {path} on node {node}"
    with open(path, "rb") as log:
        log.seek(max(0, path.stat().st_size - END_BYTES))
        return f"log {path}:\n{log_excerpt(log.read().decode(errors='replace'))}"


def log_excerpt(text: str, num_lines: int = 12) -> str:
    """The last error line of a log, then its last lines; without argparse's list of all options."""
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"\s+\[-|usage:", line)]
    errors = [line for line in lines if re.search(r"(Error|Exception|error)\b.{0,40}:", line)]
    tail = lines[-num_lines:]
    head = [errors[-1]] if errors and errors[-1] not in tail else []
    return "\n".join(f"  | {line[:400]}" for line in head + tail) or "  | (empty)"
