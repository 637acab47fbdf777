"""What the checksum mode says of servers on cue; that SGLang's checksums are what they should be only a GPU can show."""

from types import SimpleNamespace

import pytest

from megarl.errors import RunError
from megarl.rollout.checksum import compare, verify

WEIGHTS = {"0/norm": "a1", "0/experts.7": "b2"}


def servers(*states):
    """A client of two servers whose checksums are those of `states`, one state after another."""
    states, told = list(states), []
    client = SimpleNamespace(
        checksums=lambda timeout_s: states.pop(0), overwrite_weights=lambda timeout_s: told.append("overwrite")
    )
    return client, told


def test_weights_that_come_back_after_a_second_push_pass():
    both = {"http://one": WEIGHTS, "http://two": WEIGHTS}
    client, told = servers(both, both)
    verify(client, lambda: told.append("push"), "the push of version 3")
    assert told == ["overwrite", "push"]


def test_a_tensor_that_a_second_push_does_not_bring_back_is_named():
    both = {"http://one": WEIGHTS, "http://two": WEIGHTS}
    client, told = servers(both, both | {"http://two": WEIGHTS | {"0/experts.7": "00"}})
    with pytest.raises(RunError, match="http://two holds other weights .* the push of version 3: 0/experts.7$"):
        verify(client, lambda: told.append("push"), "the push of version 3")


def test_servers_that_hold_different_weights_are_named():
    client, told = servers({"http://one": WEIGHTS, "http://two": WEIGHTS | {"0/norm": "ff"}})
    with pytest.raises(RunError, match="http://one and http://two hold different weights .*: 0/norm$"):
        verify(client, lambda: told.append("push"), "the push of version 3")
    assert told == []


def test_a_server_started_again_meanwhile_has_nothing_to_be_compared_with():
    client, _ = servers({"http://new": WEIGHTS})
    compare(client, {"http://old": {}}, "reading the model folder")
