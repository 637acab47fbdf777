"""What the checksum mode says of servers on cue, and of SGLang's own checker; its HTTP call needs a GPU."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from end_to_end import ROOT

from megarl.errors import RunError
from megarl.rollout.checksum import compare, verify
from megarl.rollout.server import environment

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


CHECKER = '''
import copy, json
from types import SimpleNamespace

import torch

torch.cuda.synchronize = lambda: None  # all that the checker needs a GPU for
from sglang.srt.utils.weight_checker import WeightChecker

from megarl.errors import RunError
from megarl.rollout.checksum import verify

torch.manual_seed(1)
experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
trained = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(50, 8), "experts": experts}).requires_grad_(False)


def outcome(*left_alone, row=None):
    """What verify says of a server whose pushes do not bring some tensors, or of which one has zeroed a row."""
    served = copy.deepcopy(trained)
    if row is not None:
        served["embedding"].weight[row] = 0
    place = SimpleNamespace(tp_rank=0, tp_size=1, dp_rank=0, attn_dp_size=1, pp_rank=0, pp_size=1)
    checker = WeightChecker(get_model=lambda: served, ps=place)
    client = SimpleNamespace(
        checksums=lambda timeout_s: {"http://one": checker.handle("checksum")["checksums"]},
        overwrite_weights=lambda timeout_s: checker.handle("reset_tensors"),
    )

    def push():
        for name, parameter in served.named_parameters():
            if name not in left_alone:
                parameter.copy_(trained.get_parameter(name))

    try:
        verify(client, push, "the push of version 1")
    except RunError as error:
        return str(error).rpartition(": ")[2]
    return "passes"


print(json.dumps([outcome(), outcome("experts.2.weight"), outcome("experts.0.bias", "experts.3.bias"), outcome(row=7)]))
'''


def test_sglangs_own_checker_shows_an_expert_that_does_not_come_and_a_zeroed_row():
    """In a process of its own, as SGLang's are: neither an unrouted expert nor an unused token's row changes a log-prob."""
    command = [sys.executable, "-c", CHECKER]
    result = subprocess.run(
        command, cwd=ROOT, env=environment("cpu", 1, "127.0.0.1"), capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == ["passes", "experts.2.weight", "experts.0.bias, experts.3.bias", "embedding.weight"]
