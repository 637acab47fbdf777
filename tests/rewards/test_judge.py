"""A reward by a judging model: faults of its endpoint, and replies without a score. On a real server it is tried in
tests/rollout/test_served_judge.py."""

import asyncio
import traceback

import pytest
from aiohttp import web
from http_services import answering, die_in_mid_answer, hang, sample_of, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.errors import RunError
from megarl.rewards import options_model
from megarl.rewards.gsm8k import parse_marked_number, parse_number
from megarl.rewards.judge import PATTERN, PROMPT, judge, judge_messages, read_score
from megarl.rollout.server import free_port

SECRET = "s3cret-k3y"


def completion(content, reason="stop"):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def reward(url, sample=None, **options):
    options = {"max_retries": 0} | options
    return asyncio.run(judge(sample or sample_of("#### 5"), base_url=f"{url}/v1", model="a-judge", **options))


def failure(url, **options):
    with pytest.raises(RunError) as error:
        reward(url, **options)
    return str(error.value)


def again_at_once(status):
    return web.Response(status=status, text="overloaded", headers={"Retry-After-Ms": "1"})


async def judge_number(request, body, number):
    """What a judge does: it reads question, reference and response out of the prompt, and gives 9 or 2 out of 10."""
    content = body["messages"][-1]["content"]
    assert "user: 2 + 3?" in content
    answer = content.partition("[Reference answer]\n")[2].partition("\n")[0]
    response = content.partition("[Response]\n")[2].partition("\n\n[End")[0]
    score = 9 if parse_marked_number(response) == parse_number(answer) else 2
    return web.json_response(completion(f"The reference is {answer}, 10 would be perfect.\n**Score:** {score}/10"))


def test_a_judge_scores_responses_by_the_reference_in_0_to_1():
    with serving(judge_number) as (url, calls):
        assert reward(url, sample_of("2 + 3 = 5\n#### 5")) == pytest.approx(0.9)
        assert reward(url, sample_of("#### 6")) == pytest.approx(0.2)
        assert reward(url, system="Be strict.", low=1.0, high=17.0, temperature=0.5, extra_body={"top_p": 0.9}) == 0.5
    first, last = calls[0].body, calls[-1].body
    assert first.keys() == {"model", "messages", "temperature", "max_tokens"}
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("a-judge", 0.0, 1024)
    assert last["messages"][0] == {"role": "system", "content": "Be strict."}
    assert (last["temperature"], last["top_p"]) == (0.5, 0.9)
    assert "where 1 is the\nworst score and 17 the best" in last["messages"][1]["content"]


def test_many_samples_are_judged_at_the_same_time_and_each_gets_its_own_score():
    num_samples, all_there = 11, asyncio.Event()

    async def answer(request, body, number):
        if number == num_samples:
            all_there.set()
        await all_there.wait()
        return web.json_response(completion(f"Score: {body['messages'][0]['content']}"))

    async def ask(url):
        options = {"base_url": url, "model": "m", "prompt": "{response}"}
        return await asyncio.gather(*[judge(sample_of(str(i)), **options) for i in range(num_samples)])

    with serving(answer) as (url, _):
        assert asyncio.run(ask(url)) == pytest.approx([i / 10 for i in range(num_samples)])


@pytest.mark.parametrize(
    "reply, score",
    [
        ("Score: 7", 7),
        ("score=7", 7),
        ("Score: 7/10", 7),
        ("Score: 7 out of 10", 7),
        ("Score: 7.5.", 7.5),
        ("Score: 7, as it is right", 7),
        ("**Score:** 7", 7),
        ("**Score**: **7**", 7),
        ("Score:\n7\n", 7),
        ("Score： 7", 7),
        ('```json\n{"final_score": 7, "why": "2 errors"}\n```', 7),
        ("Overall rating: 7", 7),
        ("It is 10 of 10, but late. Score: 3\nNo, that is harsh.\nScore: 7\nThat is for 2 reasons.", 7),
        ("Score: 0", 0),
        ("Score: 10", 10),
    ],
)
def test_the_last_score_of_a_reply_is_taken(reply, score):
    assert read_score(reply, PATTERN, 0.0, 10.0, "judge") == score


@pytest.mark.parametrize(
    "reply, message",
    [
        ("", "gave no score: nothing matches .*; the reply ends in ''"),
        ("It is right in 10 of 10 points.", "gave no score: nothing matches .* ends in 'It is right"),
        ("Score: seven", "gave no score"),
        ("Score: 7-8", "gave no score"),
        ("Score: 7–8", "gave no score"),
        ("Score: 1,000", "gave no score"),
        ("Score: 7e3", "gave no score"),
        ("Score (0-10) 7", "gave no score"),
        ("Score: 11", "gave the score 11, outside of low=0 to high=10"),
        ("Score: -1", "gave the score -1, outside"),
        ("Score: 1" + "0" * 5000, "gave the score inf, outside"),
    ],
)
def test_a_reply_without_a_score_is_an_error_and_not_a_0(reply, message):
    serves = serving(answering(completion(reply)))
    with serves as (url, calls), pytest.raises(RunError, match=f"^{url}/v1: a-judge {message}"):
        reward(url)
    assert len(calls) == 1


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=50), st.integers(0, 1000).map(lambda n: n / 100))
def test_whatever_comes_before_it_the_score_at_the_end_is_taken(text, score):
    assert read_score(f"{text}\nScore: {score:g}", PATTERN, 0.0, 10.0, "judge") == score


def test_a_pattern_of_ones_own():
    assert read_score("[[3]] no, [[4]]", r"\[\[(\d+)\]\]", 1, 5, "judge") == 4
    for pattern in (r"(\w+)!", r"yes(\d)?!"):
        with pytest.raises(RunError, match="which is no number"):
            read_score("yes!", pattern, 0, 1, "judge")


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="{}abresponanswer1 \\", max_size=30), st.text(alphabet="{}question", max_size=12))
def test_texts_stand_in_the_prompt_as_they_are(response, answer):
    prompt = 'Reply like {"score": 1}. {question}|{response}|{answer}|{response}|{}'
    content = judge_messages(sample_of(response, answer), prompt, None, 0.0, 10.0)[0]["content"]
    assert content == f'Reply like {{"score": 1}}. user: 2 + 3?|{response}|{answer}|{response}|{{}}'


def test_a_missing_reference_answer_is_an_error_only_where_the_prompt_wants_it():
    sample = sample_of("#### 5", answer=None)
    with pytest.raises(ValueError, match=r"the prompt has no answer \(data.answer_key\)"):
        reward("http://127.0.0.1:1", sample)
    with serving(answering(completion("Score: 5"))) as (url, _):
        assert reward(url, sample, prompt="{question} {response}") == 0.5


def test_the_clients_own_retries_are_used_and_have_a_limit():
    with serving(answering(again_at_once(500), again_at_once(429), completion("Score: 5"))) as (url, calls):
        assert reward(url, max_retries=2) == 0.5
        assert len(calls) == 3
    with serving(answering(again_at_once(503))) as (url, calls):
        text = failure(url, max_retries=1)
        assert text.startswith(f"{url}/v1: a-judge: ") and "overloaded" in text and "(max_retries=1)" in text
        assert len(calls) == 2
    with serving(answering(web.Response(status=404, text="no such model"), completion("Score: 5"))) as (url, calls):
        assert "no such model" in failure(url, max_retries=2) and len(calls) == 1


@pytest.mark.parametrize(
    "answer, message",
    [
        (die_in_mid_answer, "Connection error. .*peer closed connection"),
        (answering(web.Response(text="<html>It works!</html>")), "no chat completion: .*It works!"),
        (answering(b"{"), "no chat completion: '{'"),
        (answering({"error": "no model loaded"}), "no chat completion: .*no model loaded"),
        (answering({"choices": []}), "no chat completion"),
        (answering({"choices": "abc"}), "no chat completion"),
        (answering({"choices": [{"message": None}]}), "no chat completion"),
        (answering(b"[1.0]"), "no chat completion"),
        (answering(b"[" * 50_000), "no chat completion"),
        (answering(completion(None)), "the reply is not whole"),
        (answering(completion(7)), "the reply is not whole"),
        (answering(completion("It is good. Score: 1", "length")), "finish_reason='length', max_tokens=1024.*'It is"),
        (answering(completion("Score: 1", "content_filter")), "finish_reason='content_filter'"),
    ],
)
def test_an_endpoint_that_dies_or_lies_is_an_error_that_names_it(answer, message):
    with serving(answer) as (url, _), pytest.raises(RunError, match=f"^{url}/v1: a-judge: .*({message})"):
        reward(url)


def test_an_endpoint_that_hangs_or_is_not_there_is_an_error_that_names_it():
    with serving(hang) as (url, calls):
        assert f"{url}/v1: a-judge: Request timed out." in failure(url, timeout_s=0.2)
        assert failure(url, deadline_s=0.2) == f"{url}/v1: a-judge gave no reply within deadline_s=0.2"
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    assert f"{nobody}/v1: a-judge: Connection error." in failure(nobody)


def test_the_key_comes_from_the_environment_and_from_the_named_variable_only(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    with serving(answering(completion("Score: 5"))) as (url, calls):
        assert reward(url, api_key_env="JUDGE_KEY") == reward(url) == 0.5
    assert calls[0].headers["Authorization"] == f"Bearer {SECRET}" and "Authorization" not in calls[1].headers
    with pytest.raises(RunError, match="the environment variable NO_SUCH_KEY is not set"):
        reward(url, api_key_env="NO_SUCH_KEY")


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_key_that_an_endpoint_repeats_is_in_no_error(monkeypatch, status):
    async def answer(request, body, number):
        return web.Response(status=status, text=f"wrong {request.headers['Authorization']}")

    monkeypatch.setenv("JUDGE_KEY", SECRET)
    with serving(answer) as (url, _), pytest.raises(RunError, match=r"wrong Bearer \*\*\*") as error:
        reward(url, api_key_env="JUDGE_KEY")
    assert SECRET not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt": "{question}"}, "{response}"),
        ({"prompt": "{response} {gold}"}, "'gold'.*valid: {question}, {response}, {answer}"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": r"\d+"}, "0 groups; valid: one"),
        ({"pattern": r"(\d)(\d)"}, "2 groups; valid: one"),
        ({"low": 10.0, "high": 1.0}, "valid: above low, which is 10"),
        ({"low": 10.0, "high": 10.0}, "valid: above low, which is 10"),
        ({"extra_body": {"temperature": 1.0, "regex": "a"}}, "temperature may not be here"),
        ({"base_url": "judge:80/v1"}, "valid: http://"),
        ({"api_key_env": "sk-123"}, "pattern"),
        ({"temperature": -1.0}, "greater than or equal to 0"),
        ({"max_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_are_refused_at_config_time(options, message):
    schema, given = options_model(judge), {"base_url": "http://judge:80/v1", "model": "m"}
    assert schema.model_validate(given | {"low": 1, "high": 5, "prompt": 'As {"score": 1}: {response} {} {3}'})
    assert schema(**given).prompt == PROMPT
    with pytest.raises(ValidationError, match=message):
        schema.model_validate(given | options)
