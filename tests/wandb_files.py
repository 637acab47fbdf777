"""What W&B's client has written of a run."""

import json
from pathlib import Path


def records(file: Path) -> list:
    """Of a .wandb file: protocol buffers in the log format of LevelDB: blocks of 32 KiB, the first with a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, found, parts = file.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def history(found: list) -> list[dict]:
    """The rows of metrics among the records, each with W&B's own keys _step, _runtime and _timestamp."""
    rows = [record.history.item for record in found if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
