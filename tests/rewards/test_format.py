"""The form of a response: what tags and patterns accept, and which options a config may give."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.rewards import options_model
from megarl.rewards.format import format
from megarl.sample import Prompt, Sample

PIECES = ["<think>", "</think>", "<answer>", "</answer>", " ", "\n", "x"]


def reward(response, **options):
    return format(Sample.from_response(Prompt([], [1]), [2], group_id=0, index=0, response_text=response), **options)


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("  <think>a\nb</think>\n\n<answer>18</answer>\n", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>1 < 2 and <b>bold</b></think><answer>2</answer>", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("Well: <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("a</think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</answer><answer>b</think>", 0.0),
        ("<think>a</think>", 0.0),
        ("<Think>a</Think><answer>b</answer>", 0.0),
        ("<think >a</think ><answer>b</answer>", 0.0),
        ("18", 0.0),
        ("", 0.0),
    ],
)
def test_without_options_the_tags_are_think_and_answer(response, expected):
    assert reward(response) == reward(response, tags=["think", "answer"]) == expected


@pytest.mark.parametrize(
    "response, options, expected",
    [
        ("<a>x</a>", {"tags": ["a"]}, 1.0),
        ("<a>x</a><b>y</b>", {"tags": ["a"]}, 0.0),
        ("<step>x</step> <step>y</step>", {"tags": ["step", "step"]}, 1.0),
        ("<a.b>x</a.b>", {"tags": ["a.b"]}, 1.0),
        ("<a.b>the tag <axb></a.b>", {"tags": ["a.b"]}, 1.0),
        ("<think>x</think><thinking>y</thinking>", {"tags": ["think", "thinking"]}, 1.0),
        ("so\nit is 18 \n", {"pattern": r".* is \d+"}, 1.0),
        ("it is 18 or 19", {"pattern": r".* is \d+"}, 0.0),
        ("it is 18", {"pattern": "is"}, 0.0),
        ("IT IS 18", {"pattern": r"(?i)it is \d+"}, 1.0),
        ("hm</think>18", {"pattern": "(?:(?!</?think>).)*</think>.+"}, 1.0),
        ("hm</think>18</think>", {"pattern": "(?:(?!</think>).)*</think>[^<]+"}, 0.0),
        ("<a>18</a>", {"tags": ["a"], "pattern": r".*\d+.*"}, 1.0),
        ("<a>x</a>", {"tags": ["a"], "pattern": r".*\d+.*"}, 0.0),
        ("18", {"tags": ["a"], "pattern": r".*\d+.*"}, 0.0),
        ("", {"pattern": ""}, 1.0),
    ],
)
def test_tags_and_patterns_must_both_hold(response, options, expected):
    assert reward(response, **options) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pattern": "("}, "no regular expression: missing \\), unterminated subpattern"),
        ({"pattern": "a{99999999999999}"}, "no regular expression: the repetition number is too large"),
        ({"tags": []}, "at least 1 item"),
        ({"tags": ["a b"]}, "should match pattern"),
        ({"tags": ["<think>"]}, "should match pattern"),
        ({"tags": "think"}, "valid list"),
    ],
)
def test_options_that_no_response_could_meet_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        options_model(format).model_validate(options)


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(st.characters()), st.lists(st.sampled_from(PIECES)).map("".join)))
def test_tags_are_what_the_loop_over_them_says(response):
    assert reward(response) == float(walks_through(response, ["think", "answer"]))


def walks_through(text, tags):
    for tag in tags:
        start, end = f"<{tag}>", f"</{tag}>"
        text = text.lstrip()
        if not text.startswith(start) or end not in text:
            return False
        content, text = text[len(start) :].split(end, 1)
        if any(f"<{slash}{name}>" in content for name in tags for slash in ("", "/")):
            return False
    return not text.strip()
