"""Test helpers (ranks.py, hf_models.py, batches.py, end_to_end.py) are importable by name; GPUs are hidden except from
tests/gpu."""

import os
import signal
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Fixtures are torn down; a shell's background job would ignore Ctrl-C, and hand that on to what the tests start.
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.default_int_handler)
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory):
    """With the toy's model and rows, for tests that only read them."""
    from megarl.data import toy

    folder = tmp_path_factory.mktemp("toy")
    toy.make(folder, seed=0)
    return folder
