"""The split between two served models: faults with small HTTP servers of the test's own, then two real ones."""

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import socket
import subprocess
import urllib.request
import uuid
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from end_to_end import ROOT, TAG, tagged_processes, wait_until
from safetensors.torch import load_file, save_file

from megarl.data import toy
from megarl.errors import ConfigError
from megarl.rollout import ab_proxy, health, serve_ab
from megarl.rollout.ab_proxy import ARM_HEADER, ABProxy, Arm, share_of
from megarl.rollout.launch import living_members
from megarl.rollout.server import free_port

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
DEADLINE_S = 20


async def usual(request):
    """As SGLang answers to /health and to a completion."""
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return web.json_response({"choices": [{"text": "hi"}], "usage": usage} if request.method == "POST" else {})


@contextlib.asynccontextmanager
async def split(tmp_path, handler_a=usual, handler_b=usual, weight_b=0.5, **more):
    """A proxy before two servers of these handlers; `post(path, **more)` -> (status, arm, body)."""
    async with contextlib.AsyncExitStack() as stack:
        arms, servers = [], []
        for name, handler in (("a", handler_a), ("b", handler_b)):
            application = web.Application(client_max_size=0)
            application.router.add_route("*", "/{path:.*}", handler)
            server = TestServer(application)
            servers.append(server)
            await stack.enter_async_context(server)
            arms.append(Arm(name, f"model-{name}", f"http://127.0.0.1:{server.port}"))
        log = tmp_path / f"{uuid.uuid4().hex}.jsonl"
        proxy = ABProxy(*arms, weight_b, log, **more)
        front = await stack.enter_async_context(TestServer(proxy.application()))
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        url = f"http://127.0.0.1:{front.port}"

        async def post(path="/v1/completions", **request):
            async with session.post(url + path, **request) as answer:
                return answer.status, answer.headers.get(ARM_HEADER), await answer.read()

        async def status():
            async with session.get(f"{url}/ab/status") as answer:
                return await answer.json()

        async def lines(number):
            """Of the log, once it has so many: a client may have its answer before the line is written."""
            while len(found := log.read_text().splitlines()) < number:
                await asyncio.sleep(0.01)
            return [json.loads(line) for line in found]

        functions = {"post": post, "status": status, "lines": lines}
        yield SimpleNamespace(url=url, session=session, servers=servers, arms=arms, **functions)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, DEADLINE_S))


def test_requests_are_split_by_weight_as_the_seed_says_and_each_is_logged(tmp_path):
    async def arms(weight_b, num_requests=60):
        async with split(tmp_path, weight_b=weight_b, seed=7) as ab:
            answered = [(await ab.post())[1] for _ in range(num_requests)]
            return answered, await ab.lines(num_requests), await ab.status()

    answered, lines, status = run(arms(0.3))
    rng = random.Random(7)
    assert answered == ["b" if rng.random() < 0.3 else "a" for _ in range(60)]
    assert 9 < answered.count("b") < 27
    assert [line["arm"] for line in lines] == answered
    assert [line["model"] for line in lines] == [f"model-{arm}" for arm in answered]
    assert all(line["latency_s"] > 0 for line in lines)
    whole = {"method": "POST", "path": "/v1/completions", "status": 200, "prompt_tokens": 3, "completion_tokens": 2}
    whole |= {"error": None, "instead_of": None}
    assert all(line.items() >= whole.items() for line in lines)
    for arm in "ab":
        count = answered.count(arm)
        counted = {"requests": count, "instead_of_the_other": 0, "failed": 0, "completion_tokens": 2 * count}
        assert status["arms"][arm] == {"model": f"model-{arm}", "alive": True} | counted
    assert set(run(arms(0.0))[0]) == {"a"} and set(run(arms(1.0))[0]) == {"b"}


def test_a_user_always_meets_the_same_model_and_a_growing_weight_only_moves_users_to_b(tmp_path):
    users = [f"user-{i}" for i in range(40)]

    async def arms(weight_b):
        async with split(tmp_path, weight_b=weight_b, user_header="X-User") as ab:
            by_header = [(await ab.post(headers={"X-User": user}))[1] for user in users]
            by_field = [(await ab.post(json={"user": user}))[1] for user in reversed(users)]
            assert by_header == by_field[::-1]
            return by_header

    few, many = run(arms(0.2)), run(arms(0.6))
    assert few == ["b" if share_of(user, 1) < 0.2 else "a" for user in users]
    assert 1 < few.count("b") < 16 < many.count("b") < 34
    assert all(after == "b" for before, after in zip(few, many) if before == "b")


def test_requests_and_answers_pass_unchanged(tmp_path):
    packed = gzip.compress(b"text" * 100)
    seen = []

    async def echo(request):
        seen.append((request.method, request.raw_path, await request.read(), request.headers))
        headers = {"Content-Encoding": "gzip", "X-Of-Model": "1", "Set-Cookie": "a=1"}
        return web.Response(body=packed, status=418, headers=headers)

    async def check():
        async with split(tmp_path, echo, echo) as ab:
            body, url = b"x" * 3_000_000, f"{ab.url}/some/%2Fpath?q=a%20b&q=2"
            headers = {"Authorization": "Bearer key", "User-Agent": "test"}
            async with ab.session.put(url, data=body, headers=headers, skip_auto_headers=["Accept-Encoding"]) as answer:
                assert (answer.status, await answer.read()) == (418, packed)
                assert answer.headers["Content-Encoding"] == "gzip" and answer.headers["X-Of-Model"] == "1"
                assert answer.headers["Content-Length"] == str(len(packed))
        ((method, path, received, headers),) = seen
        assert (method, path, received) == ("PUT", "/some/%2Fpath?q=a%20b&q=2", body)
        assert headers["Authorization"] == "Bearer key" and headers["User-Agent"] == "test"
        assert "Accept-Encoding" not in headers and headers["Host"] != ab.url.removeprefix("http://")

    run(check())


def test_a_stream_passes_piece_by_piece_and_its_last_count_of_each_response_is_logged(tmp_path):
    async def check():
        received = asyncio.Event()

        async def stream(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            for index, num_tokens in ((0, 1), (1, 1), (0, 5), (1, 4)):
                event = {"index": index, "meta_info": {"prompt_tokens": 6, "completion_tokens": num_tokens}}
                text = f"data: {json.dumps(event)}\n\n".encode()
                await response.write(text[:30])  # an event may come in parts
                await response.write(text[30:])
                await received.wait()  # a proxy that collects pieces would wait for ever
            await response.write(b"data: [DONE]\n\n")
            return response

        async with split(tmp_path, stream, stream) as ab:
            async with ab.session.post(f"{ab.url}/generate") as answer:
                assert answer.content_type == "text/event-stream"
                pieces = [await answer.content.readuntil(b"\n\n")]
                received.set()
                pieces.append(await answer.content.read())
            assert b"".join(pieces).count(b"data: ") == 5 and pieces[1].endswith(b"data: [DONE]\n\n")
            (line,) = await ab.lines(1)
            assert (line["prompt_tokens"], line["completion_tokens"]) == (12, 9)

    run(check())


def test_the_other_arm_answers_for_a_dead_one_loudly_and_without_any_it_is_503(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(health, "STRIKE_PAUSE_S", 0.02)

    async def check():
        async with split(tmp_path, weight_b=1.0) as ab:
            assert (await ab.post())[:2] == (200, "b")
            await ab.servers[1].close()
            assert [(await ab.post())[:2] for _ in range(2)] == [(200, "a")] * 2
            answered = [(line["arm"], line["instead_of"]) for line in await ab.lines(3)]
            assert answered == [("b", None), ("a", "b"), ("a", "b")]
            arms = (await ab.status())["arms"]
            assert arms["a"]["alive"] and arms["a"]["instead_of_the_other"] == 2 and not arms["b"]["alive"]
            warnings = capfd.readouterr().err
            assert warnings.count("WARNING: arm b (model-b) is dead, arm a answers its requests too: ") == 1
            await ab.servers[0].close()
            status, arm, body = await ab.post()
            assert (status, arm) == (503, None) and "both arms are dead" in body.decode()
            assert "arm a (model-a) is dead, none is left and requests get HTTP 503" in capfd.readouterr().err
            last = (await ab.lines(4))[-1]
            assert (last["arm"], last["status"]) == (None, 503)

    run(check())


def test_a_dead_process_is_told_of_though_nobody_asks_for_an_answer(tmp_path, monkeypatch, capfd):
    for name, value in (("STRIKE_PAUSE_S", 0.02), ("WATCH_S", 0.05)):
        monkeypatch.setattr(health, name, value)
    monkeypatch.setattr(ab_proxy, "LOOK_S", 0.05)

    async def check():
        async with split(tmp_path) as ab:
            ab.arms[0].death_report = lambda: "ended with signal SIGKILL"
            while "is dead, arm b answers" not in (told := capfd.readouterr().err):
                await asyncio.sleep(0.05)
            assert "the last with: ended with signal SIGKILL" in told

    run(check())


def test_a_living_arm_that_does_not_answer_in_time_is_an_error_that_names_it(tmp_path):
    async def slow(request):
        if request.method == "POST":
            await asyncio.sleep(DEADLINE_S)
        return web.Response()

    async def check():
        async with split(tmp_path, slow, weight_b=0.0, request_timeout_s=0.2) as ab:
            status, arm, body = await ab.post()
            assert (status, arm) == (502, "a") and "arm a (model-a): no answer within 0.2 s" in body.decode()
            assert "no answer within 0.2 s" in (await ab.lines(1))[0]["error"]
            assert (await ab.status())["arms"]["a"]["failed"] == 1

    run(check())


def test_an_answer_that_breaks_off_does_not_look_whole(tmp_path):
    async def broken(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        request.transport.abort()
        return response

    async def check():
        async with split(tmp_path, broken, broken) as ab:
            with pytest.raises(aiohttp.ClientError):
                await ab.post()
            assert "the answer broke off" in (await ab.lines(1))[0]["error"]

    run(check())


def test_a_client_that_leaves_ends_its_request_at_the_server(tmp_path):
    async def check():
        started, ended = asyncio.Event(), asyncio.Event()

        async def endless(request):
            started.set()
            try:
                await asyncio.sleep(2 * DEADLINE_S)
            finally:  # as soon as nobody waits for it
                ended.set()

        async with split(tmp_path, endless, endless) as ab:
            asking = asyncio.ensure_future(ab.post())
            await started.wait()
            asking.cancel()
            await ended.wait()
            (line,) = await ab.lines(1)
            assert line["status"] == 499 and line["arm"] in "ab"

    run(check())


def test_all_wrong_arguments_are_named_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        own = [str(tmp_path / "none"), str(tmp_path / "empty"), "--weight-b", "1.5", "--port", str(port)]
        own += ["--device", "cpu", "--gpus-a", "0", "--tensor-parallel", "0", "--log", str(tmp_path / "no/ab.jsonl")]
        with pytest.raises(ConfigError) as error:
            serve_ab.parse([*own, "--", "--mem-fraction-statik=0.3", "--port", "1"])
    expected = [
        ("MODEL_A", "none is no folder"),
        ("MODEL_B", "empty/config.json"),
        ("MODEL_B", "no *.safetensors and no *.bin"),
        ("--weight-b", "given 1.5, allowed: 0 to 1"),
        ("--tensor-parallel", "given 0, allowed: above 0"),
        ("--gpus-a", "given 0, but the device is cpu"),
        ("after --", "did you mean mem_fraction_static?"),
        ("after --", "--port: not allowed here"),
        ("--log", "No such file"),
        ("--port", f"127.0.0.1:{port} cannot be used: Address already in use"),
    ]
    for line, (start, text) in zip(str(error.value).splitlines(), expected, strict=True):
        assert line.startswith(f"{start}: ") and text in line


def test_sglangs_options_and_gpus_reach_the_servers(tmp_path, monkeypatch):
    toy.make(tmp_path, seed=1)
    model = str(tmp_path / "model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    own = [model, model, "--device", "cuda", "--port", "0", "--log", str(tmp_path / "ab.jsonl")]
    words = "--mem-fraction-static=0.3 --disable-radix-cache --cuda-graph-bs 1 8 --schedule-policy lpm".split()
    options = serve_ab.parse([*own, "--tensor-parallel", "2", "--gpus-b", "4,6", "--", *words])
    options.listener.close()
    assert (options.gpus_a, options.gpus_b) == (["5", "7"], ["4", "6"])
    command = serve_ab.make_server(options, "b", model).command()
    assert {"--mem-fraction-static=0.3", "--disable-radix-cache", "--schedule-policy=lpm"} <= set(command)
    place = command.index("--cuda-graph-bs")
    assert command[place : place + 3] == ["--cuda-graph-bs", "1", "8"]
    for gpus, message in (("4", "4 is in --gpus-a too"), ("9", "9 not among the visible GPUs"), ("4,5", "has 2 of")):
        with pytest.raises(ConfigError, match=f"--gpus-b: .*{message}"):
            serve_ab.parse([*own, "--gpus-a", "4", "--gpus-b", gpus])


def script(folder, *arguments, **more):
    """The script as a user starts it, in another folder than the repository's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more.pop("environment", {})
    return subprocess.Popen(
        ["bash", str(ROOT / "launch/serve_ab.sh"), *arguments], cwd=folder, env=environment, text=True, **more
    )


def test_the_script_takes_folders_from_where_it_is_called_and_exits_with_2(tmp_path):
    process = script(tmp_path, "one", "two", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "MODEL_A: one is no folder\nMODEL_B: two is no folder" in output, output


def command_line(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.soak
def test_two_real_servers_are_split_one_is_killed_and_all_end_together(tmp_path):
    for seed, name in ((1, "one"), (2, "two")):
        toy.make(tmp_path / name, seed=seed)
        path = tmp_path / name / "model/model.safetensors"
        sharper = {key: 6 * weight for key, weight in load_file(path).items()}  # as they are both say the same
        save_file(sharper, path, metadata={"format": "pt"})
    tag, port = uuid.uuid4().hex, free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"

    def call(path, body=None):
        data = body and json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.headers[ARM_HEADER], answer.read()

    def output():
        return (tmp_path / "output.txt").read_text()

    def lines(number):
        log = tmp_path / "ab.jsonl"
        assert wait_until(lambda: len(log.read_text().splitlines()) == number, 10), log.read_text()
        return [json.loads(line) for line in log.read_text().splitlines()]

    arguments = ["one/model", "two/model", "--weight-b", "0.5", "--port", str(port), "--device", "cpu"]
    arguments += ["--", "--max-total-tokens", "4096"]
    with open(tmp_path / "output.txt", "w") as file:
        process = script(tmp_path, *arguments, stdout=file, stderr=file, environment={TAG: tag})
    try:
        ready = wait_until(lambda: process.poll() is not None or "is ready" in output(), 300)
        assert ready and process.poll() is None, output()
        chat = {"model": "any", "messages": [{"role": "user", "content": "Tom has 3 apples."}], "max_tokens": 8}
        arms = {}
        for number in range(1, 13):
            arm, body = call("/v1/chat/completions", chat | {"temperature": 0})
            assert json.loads(body)["usage"]["completion_tokens"] == lines(number)[-1]["completion_tokens"]
            arms.setdefault(arm, set()).add(json.loads(body)["choices"][0]["message"]["content"])
        assert set(arms) == {"a", "b"} and all(len(texts) == 1 for texts in arms.values())
        assert arms["a"] != arms["b"]  # greedy, and two models
        stream = {"input_ids": [5, 6, 7], "stream": True, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
        _, body = call("/generate", stream)
        assert body.count(b"data: ") >= 3 and body.rstrip().endswith(b"[DONE]")
        last = lines(13)[-1]
        assert (last["prompt_tokens"], last["completion_tokens"]) == (3, 6)

        guardians = [pid for pid, command in tagged_processes(tag).items() if f"launch {process.pid} " in command]
        assert len(guardians) == 2
        members = living_members(guardians[0])  # SGLang's own have a title in place of their environment
        os.kill(next(pid for pid in members if "scheduler" in command_line(pid)), signal.SIGKILL)
        survivors = {call("/v1/chat/completions", chat)[0] for _ in range(8)}
        assert len(survivors) == 1
        (dead,) = {"a", "b"} - survivors
        assert any(line["instead_of"] == dead for line in lines(21))
        assert f"WARNING: arm {dead} (" in output()
        assert not json.loads(call("/ab/status")[1])["arms"][dead]["alive"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, output()
        assert not tagged_processes(tag) and not any(living_members(guardian) for guardian in guardians)
    finally:
        process.kill()
        wait_until(lambda: not tagged_processes(tag), 60)
