"""The token of a Ray cluster in a file, where Ray and who is let into the cluster find it by RAY_AUTH_TOKEN_PATH."""

import os
from pathlib import Path


def write_token(folder: Path, token: str) -> Path:
    """A file that its owner alone can read, from its first moment on."""
    file = folder / "token"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        opened.write(token)
    return file
