"""What generating through the client costs beside bare requests to the same server: see benchmarks/cpu_gate.py."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cpu_gate

from megarl.rollout import client as client_module

SLOW_S = 5e-4  # a response; all else of the client takes less


def test_the_client_costs_what_it_did_and_the_gate_sees_when_not(sglang_server, make_client, tokenizer, monkeypatch):
    client = make_client([sglang_server.url])
    assert cpu_gate.too_slow({"client": cpu_gate.client_ratio(client, tokenizer)}) == []
    read_response = client_module.read_response

    def slow(*arguments, **keywords):
        end = time.process_time() + SLOW_S
        while time.process_time() < end:
            pass
        return read_response(*arguments, **keywords)

    monkeypatch.setattr(client_module, "read_response", slow)
    (line,) = cpu_gate.too_slow({"client": cpu_gate.client_ratio(client, tokenizer)})
    assert line.startswith("client: ")
