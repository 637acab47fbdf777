"""HTTP services that the tests of rewards call: real aiohttp servers, in a thread of their own."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

from aiohttp import web

from megarl.sample import Prompt, Sample

Answer = Callable[[web.Request, dict, int], Awaitable[web.StreamResponse]]


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[SimpleNamespace]]]:
    """(url, calls so far with body, headers and time); `answer(request, body, number of the call)` answers a POST."""
    calls = []

    async def handle(request: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        calls.append(SimpleNamespace(body=await request.json(), headers=request.headers, time=now))
        return await answer(request, calls[-1].body, len(calls))

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def hang(request: web.Request, body: dict, number: int) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


async def die_in_mid_answer(request: web.Request, body: dict, number: int) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"reward": 1.0')
    request.transport.abort()
    return response


def answering(*answers: web.Response | dict | bytes) -> Answer:
    """In order, the last one from then on; a dict is JSON."""

    async def answer(request: web.Request, body: dict, number: int) -> web.Response:
        given = answers[min(number, len(answers)) - 1]
        if isinstance(given, dict):
            return web.json_response(given)
        if isinstance(given, bytes):
            return web.Response(body=given, content_type="application/json")
        return web.Response(status=given.status, text=given.text, headers=given.headers)

    return answer


def sample_of(response: str, answer: str | None = "5", index: int = 0, **metadata) -> Sample:
    prompt = Prompt([{"role": "user", "content": "2 + 3?"}], [1], answer, {"source": "train.jsonl:1"} | metadata)
    return Sample.from_response(prompt, [2], group_id=7, index=index, response_text=response)
