"""A reward by a service of one's own, over HTTP.

For each sample the service gets a POST with a JSON body of this form:

    {"messages": [{"role": "user", "content": "2 + 3?"}], "response": "#### 5", "answer": "5",
     "status": "completed", "metadata": {"source": "train.jsonl:1"}, "group_id": 0, "index": 0}

`answer` may be null, `status` is completed, truncated or aborted. The service answers with status 200 and JSON, one of

    {"reward": 0.5}
    {"parts": {"right": 1, "style": -0.5}}                    the reward is their sum
    {"reward": 0.5, "parts": {"right": 1, "style": -0.5}}     the parts are only logged

with finite numbers and no other key, in at most MAX_BODY bytes. All else is an error that shows how the answer begins.
No connection, no answer in time and the statuses 429 and 5xx are tried again, so a sample may come more than once.
"""

import asyncio
import email.utils
import json
import math
import os
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from megarl.errors import RunError
from megarl.rewards.breaker import Breaker

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from megarl.sample import Sample

MAX_BODY = 64 * 1024  # bytes of an answer
MAX_EXCERPT = 300  # characters of an answer in an error
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 8.0  # longest waits before the second and before any attempt
BREAKERS: defaultdict[str, Breaker] = defaultdict(Breaker)  # by url


class Fault(Exception):
    """A failure that another attempt may cure, after the time that the service asks for."""

    def __init__(self, text: str, retry_after_s: float = 0.0):
        super().__init__(text)
        self.retry_after_s = retry_after_s


def check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.port == 0:
        raise ValueError("valid: http://HOST[:PORT]/PATH or https, without user and password")
    return url


HttpUrl = Annotated[str, AfterValidator(check_url)]
EnvironmentName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Seconds = Annotated[float, Field(gt=0)]
NumRetries = Annotated[int, Field(ge=0)]


async def remote(
    sample: "Sample",
    *,
    url: HttpUrl,
    token_env: EnvironmentName | None = None,
    metadata_keys: list[str] | None = None,
    timeout_s: Seconds = 10.0,
    max_retries: NumRetries = 3,
    deadline_s: Seconds = 25.0,
    breaker_failures: Annotated[int, Field(ge=1)] = 5,
    breaker_reset_s: Seconds = 30.0,
) -> float | dict[str, float]:
    """What the service at `url` says of the sample.

    `token_env` names the environment variable that holds a bearer token. `metadata_keys`: those that are sent; None:
    all. `timeout_s` bounds an attempt, `deadline_s` all of them and the waits between: it should be below
    rewards.timeout_s, whose passing says less. After `breaker_failures` failed calls in a row, whatever the samples,
    calls fail at once for `breaker_reset_s`.

    Raises ValueError for metadata that are missing or no JSON, RunError where there is no reward.
    """
    payload, token = request_body(sample, metadata_keys), read_token(token_env)
    with BREAKERS[url].watch(url, breaker_failures, breaker_reset_s):
        body = await _post(url, payload, token, timeout_s, max_retries, deadline_s)
        return read_answer(url, body, token)


def request_body(sample: "Sample", metadata_keys: list[str] | None) -> bytes:
    """The JSON that the service gets. Raises ValueError naming the key of `metadata` that is not there or no JSON."""
    metadata = sample.prompt.metadata
    where = f"metadata of {metadata.get('source', 'a prompt')}"
    keys = metadata if metadata_keys is None else metadata_keys
    for key in keys:
        if key not in metadata:
            raise ValueError(f"{where}: no {key!r}, which is in metadata_keys; there are {', '.join(metadata)}")
        try:
            json.dumps(metadata[key], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {key!r} cannot be sent: {error}; metadata_keys may leave it out") from None
    body = {
        "messages": sample.prompt.messages,
        "response": sample.response_text,
        "answer": sample.prompt.answer,
        "status": sample.status.value,
        "metadata": {key: metadata[key] for key in keys},
        "group_id": sample.group_id,
        "index": sample.index,
    }
    return json.dumps(body).encode()


def read_token(token_env: str | None) -> str | None:
    """The secret in an environment variable. Raises RunError where there is none that a header can hold."""
    if token_env is None:
        return None
    token = os.environ.get(token_env, "")
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        state = "has white space or other characters that a header cannot hold" if token else "is not set, or is empty"
        raise RunError(f"the environment variable {token_env} {state}: it should hold a token")
    return token


def read_answer(url: str, body: bytes, token: str | None) -> float | dict[str, float]:
    """The reward, or its parts by name, from an answer's body. Raises RunError for all but the protocol's forms."""
    if len(body) > MAX_BODY:
        raise RunError(f"{url}: the answer has more than {MAX_BODY} bytes: {excerpt(body, token)}")
    try:
        answer = json.loads(body, parse_int=float)
    except (ValueError, RecursionError):
        raise RunError(f"{url}: the answer is no JSON: {excerpt(body, token)}") from None
    if not isinstance(answer, dict) or not answer or answer.keys() - {"reward", "parts"}:
        text = 'the answer is not {"reward": NUMBER} or {"parts": {NAME: NUMBER}} or both'
        raise RunError(f"{url}: {text}: {excerpt(body, token)}")
    parts = answer.get("parts", {})
    if "parts" in answer and (not isinstance(parts, dict) or not parts or "reward" in parts):
        raise RunError(f"{url}: `parts` holds no numbers by name, `reward` not among them: {excerpt(body, token)}")
    values = parts | ({"reward": answer["reward"]} if "reward" in answer else {})
    for name, value in values.items():
        if type(value) is not float or not math.isfinite(value):
            raise RunError(f"{url}: {name!r} is no finite number: {excerpt(body, token)}")
    return values if parts else values["reward"]


def excerpt(text: str | bytes, token: str | None) -> str:
    """How a foreign text begins, without the secret that a service may repeat."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return repr((text.replace(token, "***") if token else text)[:MAX_EXCERPT])


def retry_after_s(header: str | None) -> float:
    """What a Retry-After header says, in seconds or as a date (RFC 9110, section 10.2.3); 0 where it has neither."""
    if header is None:
        return 0.0
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header):
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


async def _post(
    url: str, payload: bytes, token: str | None, timeout_s: float, max_retries: int, deadline_s: float
) -> bytes:
    """The body of the answer, after as many attempts as it takes. Raises RunError."""
    import aiohttp
    import tenacity

    end = time.monotonic() + deadline_s
    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(Fault),
        wait=tenacity.wait_exception(lambda fault: fault.retry_after_s)
        + tenacity.wait_random_exponential(multiplier=FIRST_BACKOFF_S, max=MAX_BACKOFF_S),
        stop=tenacity.stop_after_attempt(max_retries + 1) | tenacity.stop_before_delay(deadline_s),
        reraise=True,
    )
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    # A session of this call's own: one that is kept would be bound to an event loop that may be gone.
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout()) as session:

        async def attempt() -> bytes:
            return await _attempt(session, url, payload, token, min(timeout_s, end - time.monotonic()))

        try:
            return await retrying(attempt)
        except Fault as fault:
            num_attempts = retrying.statistics["attempt_number"]
            limits = f"max_retries={max_retries}, deadline_s={deadline_s:g}"
            raise RunError(f"{url}: no reward after {num_attempts} attempts ({limits}): {fault}") from None


async def _attempt(session: "ClientSession", url: str, payload: bytes, token: str | None, limit_s: float) -> bytes:
    """The first MAX_BODY + 1 bytes, or a little more, of an answer of status 200. Raises Fault, or RunError."""
    import aiohttp

    body = b""
    try:
        async with asyncio.timeout(limit_s), session.post(url, data=payload, allow_redirects=False) as response:
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY:
                    break
    except TimeoutError:
        raise Fault(f"no answer within {limit_s:.3g} s") from None
    except aiohttp.ClientError as error:
        raise Fault(f"{type(error).__name__}: {excerpt(str(error), token)}") from None
    if response.status == 200:
        return body
    header = response.headers.get("Retry-After")
    wait = f", Retry-After: {excerpt(header, token)}" if header else ""
    text = f"HTTP {response.status}{wait}: {excerpt(body, token)}"
    if response.status == 429 or response.status >= 500:
        raise Fault(text, retry_after_s(header))
    raise RunError(f"{url}: {text}")
