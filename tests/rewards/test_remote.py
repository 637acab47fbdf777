"""A reward by an HTTP service: one with a rule behind it, and ones that hang, lie and die."""

import asyncio
import importlib
import json
import math
import re
import time
import traceback
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from aiohttp import web
from http_services import answering, die_in_mid_answer, hang, sample_of, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.errors import RunError
from megarl.rewards import breaker as breaker_module
from megarl.rewards import options_model
from megarl.rewards.gsm8k import parse_marked_number, parse_number
from megarl.rewards.remote import MAX_BODY, read_answer, remote, retry_after_s
from megarl.rollout.server import free_port

remote_module = importlib.import_module("megarl.rewards.remote")  # its name in megarl.rewards is the function
SECRET = "s3cret-t0ken"


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch):
    monkeypatch.setattr(remote_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(remote_module, "MAX_BACKOFF_S", 0.02)


@pytest.fixture
def clock(monkeypatch):
    """The breakers' own: it stands still unless `clock.now` is moved."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(breaker_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def reward(url, sample=None, **options):
    return asyncio.run(remote(sample or sample_of("#### 5"), url=url, **options))


def failure(url, **options):
    with pytest.raises(RunError) as error:
        reward(url, **options)
    return str(error.value)


async def score_number(request, body, number):
    """A service's rule: the marked number, and a part for brevity."""
    right = parse_marked_number(body["response"]) == parse_number(body["answer"])
    return web.json_response({"parts": {"right": int(right), "length": -len(body["response"]) / 100}})


def busy(status=503):
    return web.Response(status=status, text="overloaded")


def test_a_service_scores_responses_by_its_rule():
    with serving(score_number) as (url, calls):
        assert reward(url, sample_of("#### 5")) == {"right": 1.0, "length": -0.06}
        assert reward(url, sample_of("so #### 6", index=3)) == {"right": 0.0, "length": -0.09}
    assert calls[1].body == {
        "messages": [{"role": "user", "content": "2 + 3?"}],
        "response": "so #### 6",
        "answer": "5",
        "status": "completed",
        "metadata": {"source": "train.jsonl:1"},
        "group_id": 7,
        "index": 3,
    }


def test_many_samples_are_asked_for_at_the_same_time_and_each_gets_its_own_reward():
    num_samples, all_there = 50, asyncio.Event()

    async def answer(request, body, number):
        if number == num_samples:
            all_there.set()
        await all_there.wait()
        return web.json_response({"reward": body["index"]})

    async def ask(url):
        return await asyncio.gather(*[remote(sample_of("", index=i), url=url) for i in range(num_samples)])

    with serving(answer) as (url, _):
        assert asyncio.run(ask(url)) == list(range(num_samples))


@pytest.mark.parametrize(
    "answer, value",
    [
        ({"reward": 0.5}, 0.5),
        ({"reward": -3}, -3.0),
        ({"parts": {"right": 1, "style": 0.5}}, {"right": 1.0, "style": 0.5}),
        ({"reward": 2, "parts": {"right": 1}}, {"right": 1.0, "reward": 2.0}),
    ],
)
def test_the_forms_of_an_answer(answer, value):
    assert read_answer("http://s", json.dumps(answer).encode(), None) == value


@pytest.mark.parametrize(
    "body, message",
    [
        (b"<html><body>It works!</body></html>", "the answer is no JSON: '<html><body>It works!"),
        (b"", "the answer is no JSON: ''"),
        (b"\xff\xfe\x00", "the answer is no JSON"),
        (b"[" * 50_000, r"the answer is no JSON: '\[\[\["),
        (b"0.5", "the answer is not .*: '0.5'"),
        (b"null", "the answer is not .*: 'null'"),
        (b"[0.5]", "the answer is not"),
        (b"{}", "the answer is not"),
        (b'{"error": "no model loaded"}', "the answer is not .*no model loaded"),
        (b'{"reward": 0.0, "error": "no model loaded"}', "the answer is not .*no model loaded"),
        (b'{"reward": null}', "'reward' is no finite number: .*null"),
        (b'{"reward": NaN}', "'reward' is no finite number: .*NaN"),
        (b'{"reward": -Infinity}', "'reward' is no finite number"),
        (b'{"reward": 1e999}', "'reward' is no finite number"),
        (b'{"reward": 1' + b"0" * 5000 + b"}", "'reward' is no finite number"),
        (b'{"reward": "1.0"}', "'reward' is no finite number"),
        (b'{"reward": true}', "'reward' is no finite number"),
        (b'{"reward": [1.0]}', "'reward' is no finite number"),
        (b'{"parts": {}}', "`parts` holds no numbers by name"),
        (b'{"parts": [1.0]}', "`parts` holds no numbers by name"),
        (b'{"reward": 1.0, "parts": null}', "`parts` holds no numbers by name"),
        (b'{"parts": {"reward": 1.0}}', "`reward` not among them"),
        (b'{"parts": {"right": 1.0, "style": null}}', "'style' is no finite number"),
        (b" " * MAX_BODY + b'{"reward": 1.0}', f"more than {MAX_BODY} bytes"),
    ],
)
def test_a_service_that_lies_is_an_error_that_shows_what_came_and_is_not_asked_again(body, message):
    with serving(answering(body)) as (url, calls), pytest.raises(RunError, match=f"^{url}: .*{message}"):
        reward(url)
    assert len(calls) == 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["reward", "parts", "a"]), inner),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(JSON_VALUES)
def test_an_answer_is_finite_numbers_or_an_error(answer):
    try:
        value = read_answer("http://s", json.dumps(answer).encode(), None)
    except RunError:
        return
    assert set(answer) <= {"reward", "parts"}
    assert all(math.isfinite(number) for number in (value.values() if isinstance(value, dict) else [value]))


def test_an_answer_without_end_is_not_read_to_its_end():
    async def answer(request, body, number):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * MAX_BODY)

    with serving(answer) as (url, _):
        assert f"more than {MAX_BODY} bytes: 'xxx" in failure(url)


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422, 204])
def test_a_status_that_no_other_attempt_cures_is_not_tried_again(status):
    refusal = web.Response(status=status, text="" if status == 204 else "who are you?", headers={"Location": "/other"})
    with serving(answering(refusal, {"reward": 1.0})) as (url, calls):
        text = failure(url)
    assert len(calls) == 1 and text.startswith(f"{url}: HTTP {status}: ")
    assert status == 204 or "who are you?" in text


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_a_service_that_is_busy_for_a_while_is_asked_again(status):
    with serving(answering(busy(status), busy(status), {"reward": 1.0})) as (url, calls):
        assert reward(url, max_retries=2) == 1.0
        assert len(calls) == 3 and calls[0].body == calls[2].body


def test_a_service_that_dies_in_mid_answer_is_asked_again():
    async def answer(request, body, number):
        return await (die_in_mid_answer if number == 1 else score_number)(request, body, number)

    with serving(answer) as (url, calls):
        assert reward(url) == {"right": 1.0, "length": -0.06}
        assert len(calls) == 2
    with serving(die_in_mid_answer) as (url, calls):
        text = failure(url, max_retries=1)
        assert "no reward after 2 attempts (max_retries=1, deadline_s=25): ClientPayloadError" in text


def test_the_retries_have_a_limit_and_the_error_names_service_attempts_and_reason():
    with serving(answering(busy())) as (url, calls):
        text = failure(url, max_retries=2)
    assert text == f"{url}: no reward after 3 attempts (max_retries=2, deadline_s=25): HTTP 503: 'overloaded'"
    assert len(calls) == 3


def test_nobody_at_the_port_is_an_error_that_names_it():
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    text = failure(url, max_retries=1)
    assert text.startswith(f"{url}: no reward after 2 attempts") and "ClientConnectorError" in text


def test_a_service_that_hangs_is_given_up_after_timeout_s_and_asked_again():
    async def answer(request, body, number):
        return await (hang if number == 1 else score_number)(request, body, number)

    with serving(answer) as (url, calls):
        assert reward(url, timeout_s=0.3) == {"right": 1.0, "length": -0.06}
        assert len(calls) >= 2


def test_deadline_s_bounds_all_attempts():
    with serving(hang) as (url, calls):
        text = failure(url, timeout_s=60.0, deadline_s=0.5, max_retries=9)
        assert re.search(r"no answer within 0\.\d+ s$", text) and len(calls) == 1
    with serving(answering(busy())) as (url, calls):
        assert "deadline_s=0.5): " in failure(url, max_retries=10_000, deadline_s=0.5)
        assert 1 < len(calls) < 10_000


def test_retry_after_is_respected():
    slowly = web.Response(status=429, text="slowly", headers={"Retry-After": "0.4"})
    with serving(answering(slowly, {"reward": 1.0})) as (url, calls):
        assert reward(url) == 1.0
    assert calls[1].time - calls[0].time >= 0.4


def test_a_retry_after_beyond_the_deadline_is_an_error_at_once():
    slowly = web.Response(status=429, text="slowly", headers={"Retry-After": "3600"})
    with serving(answering(slowly)) as (url, calls):
        text = failure(url)
    assert "no reward after 1 attempts (max_retries=3, deadline_s=25): HTTP 429, Retry-After: '3600'" in text
    assert len(calls) == 1


def test_retry_after_is_a_number_of_seconds_or_a_date():
    assert retry_after_s("7") == 7.0
    assert retry_after_s(None) == retry_after_s("soon") == retry_after_s("-3") == 0.0
    assert 50 < retry_after_s(formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_after_s(formatdate(time.time() - 60, usegmt=True)) == 0.0


DATES = st.from_regex(r"Mon, \d{1,9} (Jan|Feb) \d{1,9} \d\d:\d\d:\d\d [+-]\d{1,9}", fullmatch=True)


@settings(deadline=None, max_examples=200)
@given(st.text() | DATES)
def test_no_retry_after_raises(header):
    assert retry_after_s(header) >= 0


def test_the_breaker_opens_lets_one_call_through_on_trial_and_closes(clock):
    answers = [busy()] * 4 + [{"reward": 1.0}]
    options = {"max_retries": 0, "breaker_failures": 3, "breaker_reset_s": 30.0}
    with serving(answering(*answers)) as (url, calls):
        for _ in range(3):
            assert "no reward after 1 attempts" in failure(url, **options)
        clock.now += 10
        text = failure(url, **options)
        assert text.startswith(f"{url}: not called, 3 calls in a row failed (breaker_failures=3); ")
        assert "; the next trial call is in 20.0 s; the last error: " in text
        assert text.endswith("HTTP 503: 'overloaded'") and len(calls) == 3
        clock.now += 20
        assert "no reward after 1 attempts" in failure(url, **options)  # the trial
        assert "the next trial call is in 30.0 s" in failure(url, **options) and len(calls) == 4
        clock.now += 30
        assert [reward(url, **options) for _ in range(3)] == [1.0] * 3 and len(calls) == 7


def test_only_one_call_is_on_trial_at_a_time_and_a_cancelled_one_does_not_block_the_next(clock):
    async def answer(request, body, number):
        return await (answering(busy()) if number == 1 else hang)(request, body, number)

    async def try_twice(url):
        trial = asyncio.ensure_future(remote(sample_of(""), url=url, breaker_failures=1))
        await asyncio.sleep(0)
        with pytest.raises(RunError, match="a trial call is under way"):
            await remote(sample_of(""), url=url, breaker_failures=1)
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        with pytest.raises(RunError, match="no answer within 0.2 s"):
            await remote(sample_of(""), url=url, breaker_failures=1, timeout_s=0.2, max_retries=0)

    with serving(answer) as (url, _):
        failure(url, breaker_failures=1, max_retries=0)
        clock.now += 30
        asyncio.run(try_twice(url))


def test_a_success_between_failures_and_another_url_keep_the_breaker_closed(clock):
    answers = [busy(), busy(), {"reward": 1.0}] * 3
    options = {"max_retries": 0, "breaker_failures": 3}
    with serving(answering(*answers)) as (url, calls), serving(answering(b"lie")) as (bad_url, _):
        for _ in range(3):
            assert "HTTP 503" in failure(url, **options) and "no JSON" in failure(bad_url, **options)
            assert "HTTP 503" in failure(url, **options)
            assert reward(url, **options) == 1.0
        assert "not called" in failure(bad_url, **options) and len(calls) == 9


def test_the_token_comes_from_the_environment(monkeypatch):
    async def answer(request, body, number):
        return web.json_response({"reward": float(request.headers.get("Authorization") == f"Bearer {SECRET}")})

    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    with serving(answer) as (url, calls):
        assert reward(url, token_env="SCORER_TOKEN") == 1.0
        assert reward(url) == 0.0
        assert "Authorization" not in calls[1].headers and SECRET not in json.dumps(calls[0].body)


@pytest.mark.parametrize("value, message", [(None, "is not set"), ("", "is not set"), (f"{SECRET}\n", "has white")])
def test_a_missing_or_broken_token_is_an_error_that_names_the_variable_only(monkeypatch, value, message):
    monkeypatch.delenv("SCORER_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("SCORER_TOKEN", value)
    text = failure("http://127.0.0.1:1", token_env="SCORER_TOKEN")
    assert f"SCORER_TOKEN {message}" in text and SECRET not in text


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_token_that_a_service_repeats_is_in_no_error(monkeypatch, status):
    async def answer(request, body, number):
        text = "x" * 290 + request.headers["Authorization"]  # where the excerpt ends
        return web.Response(status=status, text=text, headers={"Retry-After": request.headers["Authorization"]})

    monkeypatch.setenv("SCORER_TOKEN", SECRET)
    with serving(answer) as (url, _):
        for _ in range(2):  # the second time by the breaker
            with pytest.raises(RunError) as error:
                reward(url, token_env="SCORER_TOKEN", max_retries=0, breaker_failures=1)
            assert SECRET[:3] not in "".join(traceback.format_exception(error.value))


def test_metadata_that_are_no_json_are_refused_and_can_be_left_out():
    with serving(answering({"reward": 1.0})) as (url, calls):
        for odd in (b"bytes", {1, 2}, float("nan"), object()):
            with pytest.raises(ValueError, match="metadata of train.jsonl:1: 'odd' cannot be sent: .*metadata_keys"):
                reward(url, sample_of("", odd=odd, level=3))
        with pytest.raises(ValueError, match="no 'levle', which is in metadata_keys; there are source, level"):
            reward(url, sample_of("", level=3), metadata_keys=["levle"])
        assert not calls
        assert reward(url, sample_of("", odd=b"bytes", level=3), metadata_keys=["level"]) == 1.0
        assert calls[0].body["metadata"] == {"level": 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"url": "scorer:80"},
        {"url": "http://"},
        {"url": "ftp://scorer/a"},
        {"url": "http://user:password@scorer"},
        {"url": "http://scorer:99999"},
        {"url": "http://scorer", "token_env": "Bearer abc"},
        {"url": "http://scorer", "timeout_s": 0.0},
        {"url": "http://scorer", "max_retries": -1},
        {"url": "http://scorer", "breaker_failures": 0},
    ],
)
def test_options_that_cannot_be_are_refused_at_config_time(options):
    schema = options_model(remote)
    assert schema.model_validate({"url": "https://scorer:8080/score?a=b", "token_env": "SCORER_TOKEN"})
    with pytest.raises(ValidationError):
        schema.model_validate(options)
