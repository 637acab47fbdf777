"""A reward by a language model that judges, behind an OpenAI-compatible endpoint (Zheng et al., arXiv:2306.05685)."""

import asyncio
import functools
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from megarl.errors import RunError
from megarl.rewards.format import Pattern
from megarl.rewards.remote import EnvironmentName, HttpUrl, NumRetries, Seconds, excerpt, read_token

if TYPE_CHECKING:
    import ssl

    from openai import AsyncOpenAI

    from megarl.sample import Sample

PROMPT = """\
Judge the response to a question by the reference answer.

[Question]
{question}

[Reference answer]
{answer}

[Response]
{response}

[End of the response]
Is the response correct, complete and clear? Say briefly why. Then end with one line of this form, where {low} is the
worst score and {high} the best:
Score: NUMBER"""
# `Score: 7`, `**Score:** 7/10`, `"score": 7.5`; of `Score: 7-8`, `Score: 1,000` and `Score: 7e3` none is a number.
PATTERN = r"""(?i)(?:score|rating)["'`*_\s]*[:=：]["'`*_\s]*([+-]?\d++(?:\.\d++)?+)(?![.,–-]?\w)"""
PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
PLACEHOLDERS = ("question", "response", "answer", "low", "high")
OPTION_KEYS = ("model", "messages", "temperature", "max_tokens", "stream", "n")  # of a request, not for extra_body
MAX_REPLY_END = 300  # characters of a reply in an error


def check_prompt(prompt: str) -> str:
    found = PLACEHOLDER.findall(prompt)
    if "response" not in found or set(found) - set(PLACEHOLDERS):
        places = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise ValueError(f"its places are {found}; valid: {places}, and {{response}} among them")
    return prompt


def check_groups(pattern: str) -> str:
    if (num_groups := re.compile(pattern).groups) != 1:
        raise ValueError(f"it has {num_groups} groups; valid: one, around the number")
    return pattern


def check_high(high: float, info: ValidationInfo) -> float:
    low = info.data.get("low")
    if low is not None and high <= low:
        raise ValueError(f"valid: above low, which is {low:g}")
    return high


def check_extra_body(body: dict[str, Any]) -> dict[str, Any]:
    if taken := [key for key in body if key in OPTION_KEYS]:
        raise ValueError(f"{', '.join(taken)} may not be here: megarl sets it, or has an option for it")
    return body


async def judge(
    sample: "Sample",
    *,
    base_url: HttpUrl,
    model: str,
    prompt: Annotated[str, AfterValidator(check_prompt)] = PROMPT,
    system: str | None = None,
    pattern: Annotated[Pattern, AfterValidator(check_groups)] = PATTERN,
    low: float = 0.0,
    high: Annotated[float, AfterValidator(check_high)] = 10.0,
    temperature: Annotated[float, Field(ge=0)] | None = 0.0,
    max_tokens: Annotated[int, Field(ge=1)] | None = 1024,
    extra_body: Annotated[dict[str, Any], AfterValidator(check_extra_body)] = {},  # noqa: B006  # nobody changes it
    api_key_env: EnvironmentName | None = None,
    timeout_s: Seconds = 20.0,
    max_retries: NumRetries = 2,
    deadline_s: Seconds = 25.0,
) -> float:
    """(score - low) / (high - low), in [0, 1], of the score that `model` at `base_url` (http://HOST:PORT/v1) gives.

    `prompt` has the places {question} (all messages), {response}, {answer}, {low} and {high}; other braces stand for
    themselves. The score is the one group of the last match of `pattern` in the reply. `temperature` and `max_tokens`
    are not sent where null; `extra_body` is added to the request: SGLang's `regex`, say, for a server on GPUs.
    `api_key_env` names the environment variable that holds the key. `timeout_s` bounds the endpoint's silence in an
    attempt, `deadline_s` all attempts: it should be below rewards.timeout_s, whose passing says less.

    Raises ValueError for a prompt with {answer} where the sample has none, RunError where there is no score: no reply,
    one that was cut at max_tokens, one without a number, a number outside of low to high.
    """
    where = f"{base_url}: {model}"
    request = {"model": model, "messages": judge_messages(sample, prompt, system, low, high), "extra_body": extra_body}
    request |= {"temperature": temperature} if temperature is not None else {}
    request |= {"max_tokens": max_tokens} if max_tokens is not None else {}
    api_key = read_token(api_key_env)
    try:
        async with asyncio.timeout(deadline_s), _client(base_url, api_key, timeout_s, max_retries) as client:
            reply = await _reply(client, request, api_key, where)
    except TimeoutError:
        raise RunError(f"{where} gave no reply within deadline_s={deadline_s:g}") from None
    score = read_score(reply, pattern, low, high, where)
    return (score - low) / (high - low)


def judge_messages(sample: "Sample", prompt: str, system: str | None, low: float, high: float) -> list[dict[str, str]]:
    """What the judge is asked. Raises ValueError where the prompt wants an answer that the sample has not."""
    values = {
        "question": "\n\n".join(f"{message['role']}: {message['content']}" for message in sample.prompt.messages),
        "response": sample.response_text,
        "answer": sample.prompt.answer,
        "low": f"{low:g}",
        "high": f"{high:g}",
    }
    if values["answer"] is None and "{answer}" in prompt:
        raise ValueError("the prompt has no answer (data.answer_key), but the judge's has {answer}")
    # In one pass and not by str.format: a response may hold braces, and names of places too.
    content = PLACEHOLDER.sub(lambda match: values[match[1]], prompt)
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": content}]


def read_score(reply: str, pattern: str, low: float, high: float, where: str) -> float:
    """The number in the last match. Raises RunError where there is none, or one outside of [low, high]."""
    end = f"the reply ends in {reply[-MAX_REPLY_END:]!r}"
    found = [match[1] for match in re.finditer(pattern, reply)]
    if not found:
        raise RunError(f"{where} gave no score: nothing matches {pattern!r}; {end}")
    try:
        score = float(found[-1])
    except (TypeError, ValueError):  # the pattern's group took no part in the match, or takes more than numbers
        raise RunError(f"{where} gave no score: {pattern!r} finds {found[-1]!r}, which is no number; {end}") from None
    if not low <= score <= high:
        raise RunError(f"{where} gave the score {score:g}, outside of low={low:g} to high={high:g}; {end}")
    return score


async def _reply(client: "AsyncOpenAI", request: dict, api_key: str | None, where: str) -> str:
    """The judge's whole text. Raises RunError."""
    import openai

    try:
        # As text: the client's own reading checks nothing, and lets what is no JSON through as errors of many kinds.
        text = (await client.chat.completions.with_raw_response.create(**request)).text
    except openai.APIConnectionError as error:  # its own text does not say what went wrong
        cause = excerpt(f"{type(error.__cause__).__name__}: {error.__cause__}", api_key)
        raise RunError(f"{where}: {error} {cause} (max_retries={client.max_retries})") from None
    except openai.OpenAIError as error:
        cause = excerpt(f"{type(error).__name__}: {error}", api_key)
        raise RunError(f"{where}: {cause} (max_retries={client.max_retries})") from None
    try:
        choice = json.loads(text)["choices"][0]
        reply, reason = choice["message"]["content"], choice["finish_reason"]
    except (ValueError, TypeError, LookupError, RecursionError):
        raise RunError(f"{where}: the answer is no chat completion: {excerpt(text, api_key)}") from None
    if not isinstance(reply, str) or reason != "stop":
        why = f"finish_reason={reason!r}, max_tokens={request.get('max_tokens')}"
        raise RunError(f"{where}: the reply is not whole ({why}): it ends in {str(reply)[-MAX_REPLY_END:]!r}")
    return reply


def _client(base_url: str, api_key: str | None, timeout_s: float, max_retries: int) -> "AsyncOpenAI":
    """A client for one call: one that is kept would be bound to an event loop that may be gone."""
    import openai

    http_client = openai.DefaultAsyncHttpxClient(verify=_ssl_context())
    # Without a key of ours an empty one, or the client takes that of OPENAI_API_KEY to whatever server this is.
    return openai.AsyncOpenAI(
        base_url=base_url, api_key=api_key or "", timeout=timeout_s, max_retries=max_retries, http_client=http_client
    )


@functools.cache
def _ssl_context() -> "ssl.SSLContext":
    """One for all clients: making it takes 15 ms, in which no other call goes on."""
    import httpx

    return httpx.create_ssl_context()
