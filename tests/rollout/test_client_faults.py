"""Faults that a real server cannot be told to make: a small HTTP server of the test's own stands in."""

import base64
import json
import pickle
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megarl.errors import RunError
from megarl.rollout import client as client_module
from megarl.rollout.responses import input_logprobs, read_response
from megarl.rollout.server import free_port
from megarl.rollout.weights_group import Bucket
from megarl.sample import Prompt, Status

PROMPT = Prompt([], [5, 6, 7])


def response(ids=(11, 2), reason=None, logprobs=None, version="4"):
    """One response in SGLang's form; by default ended by the stop token 2."""
    ids = list(ids)
    entries = [[-0.5, i, None] for i in ids] if logprobs is None else logprobs
    reason = reason or {"type": "stop", "matched": 2}
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {"finish_reason": reason, "output_token_logprobs": entries, "weight_version": version},
    }


class WordTokenizer:
    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture
def fake_server():
    """fake_server(answer) -> (url, calls); answer(path, number of the call) gives (HTTP status, JSON)."""
    servers = []

    def make(answer):
        calls = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):  # /health
                self.send_response(200)
                self.end_headers()

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                calls.append((self.path, body))
                status, content = answer(self.path, len(calls))
                payload = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", calls

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 0.01)


def test_a_request_is_tried_again_after_server_errors(fake_server, make_client):
    url, calls = fake_server(lambda path, n: (500, "busy") if n < 3 else (200, response()))
    sample = make_client([url], max_retries=2).generate([PROMPT], 1, WordTokenizer())[0]
    assert len(calls) == 3
    assert sample.token_ids.tolist() == [5, 6, 7, 11, 2]
    assert sample.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert sample.response_text == "11 2"
    assert sample.status is Status.COMPLETED
    assert sample.policy_version == (4, 4)


def test_the_retries_have_a_limit_and_the_error_names_server_and_reason(fake_server, make_client):
    url, calls = fake_server(lambda path, n: (500, "out of memory"))
    with pytest.raises(RunError, match=rf"failed 3 times \(rollout.max_retries=2\): {url}: HTTP 500: .*out of memory"):
        make_client([url], max_retries=2).generate([PROMPT], 1, WordTokenizer())
    assert len(calls) == 3


def test_a_dead_servers_requests_go_to_the_next_one_and_are_no_fault_of_theirs(fake_server, make_client):
    dead = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    url, calls = fake_server(lambda path, n: (200, response()))
    client = make_client([dead, url], max_retries=0)
    assert len(client.generate([PROMPT] * 4, 1, WordTokenizer())) == len(calls) == 4
    assert client.urls == [url]
    ((found, why),) = client.take_dead().items()
    assert found == dead and "3 health checks in a row failed" in why and client.take_dead() == {}


def test_requests_of_the_only_server_wait_for_its_successor(fake_server, make_client):
    dead = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    url, calls = fake_server(lambda path, n: (200, response()))
    client = make_client([dead], max_retries=0)

    def restart():
        if client.take_dead():
            assert client.urls == []
            client.admit([url])
            client.open_gate()

    assert len(client.generate([PROMPT] * 2, 1, WordTokenizer(), while_waiting=restart)) == len(calls) == 2


def test_prompts_are_spread_over_the_servers(fake_server, make_client):
    first, first_calls = fake_server(lambda path, n: (200, [response()] * 2))
    second, second_calls = fake_server(lambda path, n: (200, [response()] * 2))
    make_client([first, second]).generate([Prompt([], [i]) for i in range(5)], 2, WordTokenizer())
    assert sorted(body["input_ids"] for _, body in first_calls) == [[0], [2], [4]]
    assert sorted(body["input_ids"] for _, body in second_calls) == [[1], [3]]
    assert first_calls[0][1]["sampling_params"]["n"] == 2


@pytest.mark.parametrize(
    "first_answer",
    [
        (200, response(reason={"type": "abort", "message": "Abort in waiting queue"})),
        (499, {"error": {"message": "Request was aborted"}}),
    ],
)
def test_an_aborted_request_is_made_again(fake_server, make_client, first_answer):
    url, calls = fake_server(lambda path, n: first_answer if n == 1 else (200, response()))
    sample = make_client([url], max_retries=1).generate([PROMPT], 1, WordTokenizer())[0]
    assert len(calls) == 2
    assert sample.status is Status.COMPLETED


def test_requests_that_are_always_aborted_are_given_up(fake_server, make_client):
    url, calls = fake_server(lambda path, n: (200, response(reason={"type": "abort", "message": "no memory"})))
    with pytest.raises(RunError, match=f"failed 2 times .*{url}: aborted: no memory"):
        make_client([url], max_retries=1).generate([PROMPT], 1, WordTokenizer())


def test_a_silent_server_is_given_up_at_the_deadline(fake_server, make_client):
    url, calls = fake_server(lambda path, n: time.sleep(5))
    with pytest.raises(RunError, match=rf"{url}: no answer to /generate within 0.2 s"):
        make_client([url], max_retries=0, request_timeout_s=0.2).generate([PROMPT], 1, WordTokenizer())
    with pytest.raises(RunError, match=f"{url}/pause_generation: no answer to /pause_generation within 0.1 s"):
        make_client([url]).pause(timeout_s=0.1)


def test_a_request_that_the_server_refuses_is_not_repeated(fake_server, make_client):
    url, calls = fake_server(lambda path, n: (400, {"error": {"message": "input is too long"}}))
    with pytest.raises(RunError, match=f"{url}/generate: HTTP 400: .*input is too long"):
        make_client([url], max_retries=5).generate([PROMPT], 1, WordTokenizer())
    assert len(calls) == 1


def test_too_few_responses_are_an_error(fake_server, make_client):
    url, _ = fake_server(lambda path, n: (200, [response()] * 3))
    with pytest.raises(RunError, match="3 responses for group_size=4"):
        make_client([url]).generate([PROMPT], 4, WordTokenizer())


def test_a_stage_is_one_order_for_all_ranks_and_only_the_last_of_a_version_flushes_and_carries_it(
    fake_server, make_client
):
    url, calls = fake_server(lambda path, n: (200, {"success": True, "message": "ok"}))
    client = make_client([url])
    client._num_ranks[url] = 2  # else it asks a server that knows
    buckets = [Bucket([name], ["float32"], [[2]]) for name in ("a", "b", "c")]
    client.receive_weights(buckets[:2], "stage-0", None, timeout_s=5).result()
    client.receive_weights(buckets[2:], "stage-1", "7", timeout_s=5).result()
    sent = []
    for path, body in calls:
        payloads = [pickle.loads(base64.b64decode(payload)) for payload in body.pop("serialized_named_tensors")]
        ((order, tensor),) = payloads[0]
        assert len(payloads) == 2 and tensor.numel() == 0 and path == "/update_weights_from_tensor"
        order = json.loads(order)
        sent.append((order["do"], order["group"], [bucket[0] for bucket in order["buckets"]], body))
    receiver = {"load_format": "megarl.rollout.receiver.receive"}
    assert sent == [
        ("receive", "stage-0", [["a"], ["b"]], receiver | {"flush_cache": False, "weight_version": None}),
        ("receive", "stage-1", [["c"]], receiver | {"flush_cache": True, "weight_version": "7"}),
    ]


def test_a_weight_update_without_success_is_an_error_naming_the_server(fake_server, make_client):
    good, _ = fake_server(lambda path, n: (200, {"success": True, "message": "ok"}))
    bad, _ = fake_server(lambda path, n: (200, {"success": False, "message": "Cache flush failed"}))
    client = make_client([good, bad])
    client._num_ranks = {good: 1, bad: 1}
    received = client.receive_weights([Bucket(["w"], ["float32"], [[2]])], "group", "7", timeout_s=5)
    with pytest.raises(RunError, match=f"{bad}/update_weights_from_tensor: Cache flush failed"):
        received.result()


def test_a_gate_that_stays_closed_is_an_error(fake_server, make_client):
    url, calls = fake_server(lambda path, n: (200, response()))
    client = make_client([url], request_timeout_s=0.2)
    client.close_gate()
    with pytest.raises(RunError, match="the gate stayed closed for 0.2 s"):
        client.generate([PROMPT], 1, WordTokenizer())
    assert not calls


@pytest.mark.parametrize(
    "answer, message",
    [
        (response(reason={"type": "stop", "matched": "NaN happened"}), "stopped at 'NaN happened', not at its last"),
        (response(reason={"type": "stop", "matched": 3}), "stopped at 3, not at its last token"),
        (response(reason={"type": "length", "length": 2}), "cut a response at 2 tokens, asked for 9.*max_total_tokens"),
        (response(logprobs=[[-0.5, 11, None]]), "1 log-probs do not belong to the 2 tokens"),
        (response(logprobs=[[-0.5, 11, None], [-0.5, 3, None]]), "2 log-probs do not belong to the 2 tokens"),
        (response(logprobs=[[-0.5, 11, None], [float("nan"), 2, None]]), "not finite"),
        (response(logprobs=[[-0.5, 11, None], [None, 2, None]]), "not finite"),  # as SGLang's JSON has it
        (response(version="default"), "weight_version 'default' is not one of megarl's"),
    ],
)
def test_a_response_that_cannot_be_trained_on_is_refused(answer, message):
    with pytest.raises(RunError, match=f"http://s.*{message}"):
        read_response("http://s", PROMPT, answer, limit=9, with_logprobs=True)


def test_scores_of_other_tokens_are_refused():
    answer = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.25, 2, None]]}}
    assert input_logprobs("http://s", [1, 2], answer) == [0.0, -0.25]
    last_of_the_vocabulary = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.25, 0, None]]}}
    assert input_logprobs("http://s", [1, 2], last_of_the_vocabulary) == [0.0, -0.25]
    with pytest.raises(RunError, match="other tokens than the 3"):
        input_logprobs("http://s", [1, 2, 3], answer)
