"""One HTTP call to a server, and what its failure means."""

import json
from typing import Any

import aiohttp

from megarl.errors import RunError

ABORTED_STATUS = 499  # SGLang's answer where a request was aborted before its first token
MAX_BODY = 500  # characters of a server's answer in an error


class ServerFault(Exception):
    """A failure that another attempt may cure: no connection, no answer in time, HTTP 5xx, an abort."""


class Aborted(ServerFault):
    """The server gave a request up, as a pause has it do."""


async def open_session() -> aiohttp.ClientSession:
    # No limit on connections: max_concurrent_prompts is the limit. One connection per request: a kept one may be
    # closed by the server (after 5 s) at the moment it is used again.
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def call(session: aiohttp.ClientSession, url: str, path: str, body: dict | None, timeout_s: float) -> Any:
    """POST `body`, or GET without one. The answer's JSON, or its text where it is none. Raises ServerFault, or RunError for
    HTTP 4xx."""
    method, timeout = "GET" if body is None else "POST", aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(method, url + path, json=body, timeout=timeout) as response:
            text = await response.text()
    except TimeoutError:
        raise ServerFault(f"no answer to {path} within {timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise ServerFault(f"{type(error).__name__}: {error}") from error
    if response.status == ABORTED_STATUS:
        raise Aborted(f"HTTP {response.status}: {text[:MAX_BODY]}")
    if response.status >= 500:
        raise ServerFault(f"HTTP {response.status}: {text[:MAX_BODY]}")
    if response.status >= 400:
        raise RunError(f"{url}{path}: HTTP {response.status}: {text[:MAX_BODY]}")
    return json.loads(text) if response.content_type == "application/json" else text
