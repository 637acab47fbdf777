import os

import pytest


@pytest.fixture(autouse=True)
def no_sync(monkeypatch):
    """A kill takes nothing that was written; a sync helps against a loss of power only, and takes its time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
