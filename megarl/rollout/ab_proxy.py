"""One address for two served models: requests are split by weight, and each answer is logged with the arm that gave it.

An arm that dies is not started again: its share goes to the other one, loudly.
"""

import asyncio
import contextlib
import datetime
import hashlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from megarl.errors import RunError
from megarl.rollout import http
from megarl.rollout.health import Health
from megarl.rollout.http import ServerFault
from megarl.rollout.server import HEALTH_TIMEOUT_S

ARM_HEADER = "X-Megarl-Arm"  # of an answer: who gave it
CONNECT_S = 5.0
LOOK_S = 1.0  # between looks for arms that were found dead
CLIENT_GONE = 499  # status in the log where the client did not wait for its answer
# Of a connection, not of a message (RFC 9110, section 7.6.1); host and length are those of the next connection.
HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
NOT_ADDED = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # by aiohttp where the client sent none


@dataclass
class Arm:
    name: str
    model: str
    url: str
    death_report: Callable[[], str | None] = lambda: None  # why the server is dead, if one knows without asking it
    counts: Counter = field(default_factory=Counter)


class ABProxy:
    """Of `weight_b` of the requests arm b is chosen, of the others arm a.

    The choice is drawn anew for each request from a generator with `seed`; with a `user_header` it is a hash of that
    header, or else of the field `user` of a JSON body: a user meets one model, and a growing weight only moves users to
    b. `request_timeout_s` bounds the wait for an answer and for each further piece of it. A line for each request is
    appended to the file at `log_path`.
    """

    def __init__(
        self,
        arm_a: Arm,
        arm_b: Arm,
        weight_b: float,
        log_path: Path,
        seed: int = 1,
        user_header: str | None = None,
        request_timeout_s: float = 600.0,
    ):
        self.arms = (arm_a, arm_b)
        self.weight_b = weight_b
        self.seed = seed
        self.user_header = user_header
        self.timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=request_timeout_s)
        self._random = random.Random(seed)
        self._log_path = log_path
        gate = asyncio.Event()
        gate.set()
        self._health = Health([arm.url for arm in self.arms], gate, self._ask_health)

    def application(self) -> web.Application:
        application = web.Application(client_max_size=0)  # no limit
        application.cleanup_ctx.append(self._running)
        application.router.add_get("/ab/status", self._status)
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def _running(self, application: web.Application) -> AsyncIterator[None]:
        # A connection per request, as in http.py; what is compressed stays so.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=self.timeout) as session:
            with open(self._log_path, "a", buffering=1) as self._log:
                self._session = session
                tasks = [asyncio.ensure_future(each) for each in (self._health.watch(), self._look_for_deaths())]
                yield
                for task in tasks:
                    task.cancel()

    # One request

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        begin, body = time.monotonic(), await request.read()
        chosen = self._choose(request, body)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"time": now, "arm": None, "instead_of": None, "model": None, "method": request.method}
        entry |= {"path": request.path, "status": CLIENT_GONE, "latency_s": None}
        entry |= {"prompt_tokens": None, "completion_tokens": None, "error": None}
        try:
            response = await self._answer(request, body, chosen, entry)
            entry["status"] = response.status
            return response
        finally:
            entry["latency_s"] = round(time.monotonic() - begin, 4)
            self._record(entry)

    def _choose(self, request: web.Request, body: bytes) -> Arm:
        user = self.user_header and (request.headers.get(self.user_header) or user_field(body))
        draw = self._random.random() if user is None else share_of(user, self.seed)
        return self.arms[draw < self.weight_b]

    async def _answer(self, request: web.Request, body: bytes, chosen: Arm, entry: dict) -> web.StreamResponse:
        """By the chosen arm, or by the other one where that is dead."""
        for arm in sorted(self.arms, key=lambda arm: arm is not chosen):
            if arm.url not in self._health.urls:
                continue
            entry |= {"arm": arm.name, "model": arm.model, "instead_of": None if arm is chosen else chosen.name}
            try:
                answer = await self._health.until_death(arm.url, self._send(arm, request, body))
            except ServerFault as fault:
                is_dead = await self._health.is_dead(arm.url, str(fault))
                self._tell_deaths()
                if is_dead:
                    continue
                return refuse(502, entry, f"arm {arm.name} ({arm.model}): {fault}")
            return await self._pass_on(request, arm, answer, entry)
        entry |= {"arm": None, "model": None, "instead_of": None}
        return refuse(503, entry, "both arms are dead")

    async def _send(self, arm: Arm, request: web.Request, body: bytes) -> aiohttp.ClientResponse:
        """The request to an arm, up to the first byte of its answer. Raises ServerFault."""
        path, query = request.rel_url.raw_path, request.rel_url.raw_query_string
        base = URL(arm.url)
        url = URL.build(scheme="http", host=base.host, port=base.port, path=path, query_string=query, encoded=True)
        headers = end_to_end(request.headers)
        headers.popall("Content-Length", None)
        try:
            return await self._session.request(
                request.method,
                url,
                headers=headers,
                data=body or None,
                allow_redirects=False,
                skip_auto_headers=NOT_ADDED,
            )
        except TimeoutError:
            raise ServerFault(f"no answer within {self.timeout.sock_read:g} s") from None
        except aiohttp.ClientError as error:
            raise ServerFault(f"{type(error).__name__}: {error}") from error

    async def _pass_on(
        self, request: web.Request, arm: Arm, answer: aiohttp.ClientResponse, entry: dict
    ) -> web.StreamResponse:
        """Each piece of the answer as soon as it is there."""
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=end_to_end(answer.headers))
        response.headers[ARM_HEADER] = arm.name
        tokens = TokenCount(answer.content_type)
        async with answer:
            await response.prepare(request)
            pieces = answer.content.iter_any()
            while True:
                try:
                    piece = await anext(pieces)
                except StopAsyncIteration:
                    break
                except (TimeoutError, aiohttp.ClientError) as error:
                    entry["error"] = f"the answer broke off: {type(error).__name__}: {error}"
                    request.transport.close()  # the client is not to take it for the whole
                    return response
                tokens.feed(piece)
                await response.write(piece)
        await response.write_eof()
        entry["prompt_tokens"], entry["completion_tokens"] = tokens.totals()
        return response

    # What is kept of it

    def _record(self, entry: dict) -> None:
        for arm in self.arms:
            if arm.name == entry["arm"]:
                arm.counts["requests"] += 1
                arm.counts["instead_of_the_other"] += entry["instead_of"] is not None
                arm.counts["failed"] += entry["status"] >= 500 or entry["error"] is not None
                arm.counts["completion_tokens"] += entry["completion_tokens"] or 0
        try:
            self._log.write(json.dumps(entry) + "\n")
        except OSError as error:
            warn(f"{self._log_path} cannot be written ({error.strerror}); lost: {json.dumps(entry)}")

    async def _status(self, request: web.Request) -> web.Response:
        names = ("requests", "instead_of_the_other", "failed", "completion_tokens")
        arms = {
            arm.name: {"model": arm.model, "alive": arm.url in self._health.urls} | {n: arm.counts[n] for n in names}
            for arm in self.arms
        }
        return web.json_response({"weight_b": self.weight_b, "sticky": self.user_header is not None, "arms": arms})

    # Deaths

    async def _ask_health(self, url: str) -> None:
        (arm,) = (arm for arm in self.arms if arm.url == url)
        if report := arm.death_report():
            raise ServerFault(report)
        with contextlib.suppress(RunError):  # an answer all the same
            await http.call(self._session, url, "/health", None, HEALTH_TIMEOUT_S)

    async def _look_for_deaths(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._tell_deaths()

    def _tell_deaths(self) -> None:
        for url, why in self._health.take_dead().items():
            (arm,) = (arm for arm in self.arms if arm.url == url)
            living = [other.name for other in self.arms if other.url in self._health.urls]
            then = f"arm {living[0]} answers its requests too" if living else "none is left and requests get HTTP 503"
            warn(f"arm {arm.name} ({arm.model}) is dead, {then}: {why}")


class TokenCount:
    """Tokens of an answer as SGLang gives them in its JSON or in its events, where the last of each response counts."""

    def __init__(self, content_type: str):
        self._is_stream = content_type == "text/event-stream"
        self._is_json = content_type == "application/json"
        self._rest = bytearray()
        self._counts: dict[int, tuple[int, int]] = {}

    def feed(self, piece: bytes) -> None:
        if not (self._is_stream or self._is_json):
            return
        self._rest += piece
        if self._is_stream:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._read(line.removeprefix(b"data:"))

    def totals(self) -> tuple[int, int] | tuple[None, None]:
        """(prompt tokens, completion tokens), of several responses the sums."""
        if self._is_json:
            self._read(bytes(self._rest))
        return tuple(map(sum, zip(*self._counts.values()))) if self._counts else (None, None)

    def _read(self, text: bytes) -> None:
        try:
            answer = json.loads(text)
        except ValueError:
            return  # [DONE], a line between events, or no JSON
        for place, one in enumerate(answer if isinstance(answer, list) else [answer]):
            said = (one.get("usage") or one.get("meta_info")) if isinstance(one, dict) else None
            if isinstance(said, dict) and "completion_tokens" in said:
                self._counts[one.get("index", place)] = said.get("prompt_tokens", 0), said["completion_tokens"]


def share_of(user: str, seed: int) -> float:
    """In [0, 1), evenly spread over users, the same in every process."""
    digest = hashlib.blake2b(f"{seed} {user}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def user_field(body: bytes) -> str | None:
    try:
        fields: Any = json.loads(body)
    except ValueError:
        return None
    user = fields.get("user") if isinstance(fields, dict) else None
    return None if user is None else str(user)


def end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """A copy without what belongs to one connection."""
    copy = headers.copy()
    for name in HOP_BY_HOP:
        copy.popall(name, None)
    return copy


def refuse(status: int, entry: dict, text: str) -> web.Response:
    entry["error"] = text
    headers = {ARM_HEADER: entry["arm"]} if entry["arm"] else {}
    return web.json_response({"error": {"message": f"serve_ab: {text}"}}, status=status, headers=headers)


def warn(text: str) -> None:
    print(f"serve_ab: WARNING: {text}", file=sys.stderr, flush=True)
