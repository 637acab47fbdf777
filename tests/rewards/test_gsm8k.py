"""GSM8K's rule: every answer format that was once scored wrongly somewhere, and the choices made."""

import json
import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.data import toy
from megarl.rewards import options_model
from megarl.rewards.gsm8k import gsm8k, parse_last_number, parse_number
from megarl.sample import Prompt, Sample, Status

FULL_WIDTH = {code: code + 0xFEE0 for code in range(0x21, 0x7F)} | {ord(" "): 0x3000}
LONG = 200_000  # characters
LONG_TEXTS = {  # none has an answer
    "digits": "9" * LONG,
    "commas": "," * LONG,
    "spaces": " " * LONG,
    "line breaks": "\n" * LONG,
    "no-break spaces": "\xa0" * LONG,
    "markers": "#" * LONG,
    "markers and spaces": "#### " * (LONG // 5),
    "markers and digits": "9####9" * (LONG // 6) + "####",
    "signs": "+-" * (LONG // 2),
    "one sign far away": "-" + " " * LONG + "x",
    "digits with dots": "9." * (LONG // 2),
    "digits with commas": "1," * (LONG // 2),
    "thousands": "1" + ",234" * (LONG // 4) + ",5",
    "digits with spaces": "1 " * (LONG // 2),
    "digits on lines": "17\n" * (LONG // 3),
    "exponents": "1e" * (LONG // 2),
    "a long exponent": "1e" + "9" * LONG,
    "a long fraction": "0." + "0" * LONG + "1",
    "currency": "$" * LONG,
    "braces": "{" * (LONG // 2) + "}" * (LONG // 2),
    "boxes": "\\boxed{" * (LONG // 7),
    "nested numbers": "{1" * (LONG // 4) + "}2" * (LONG // 4),
    "letters": "17 " + "x" * LONG,
    "half words": "17 " + "million" * (LONG // 7),
    "short words": "17 " + "a b " * (LONG // 4),
    "Chinese": "17 " + "\u7b54" * LONG,
    "emoji": "17 " + "\U0001f600" * LONG,
    "surrogates": "17 " + "\ud800" * LONG,
    "full-width digits": "\uff15" * LONG,
    "full-width and not": "\uff15\u7b54" * (LONG // 2),
    "other digits": "\u0660" * LONG,
}


def reward(response, gold, status=Status.COMPLETED, **options):
    prompt = Prompt(messages=[], token_ids=[1], answer=gold)
    sample = Sample.from_response(prompt, [2], group_id=0, index=0, response_text=response, status=status)
    return gsm8k(sample, **options)


@st.composite
def spellings(draw, value):
    """One of the ways to write a decimal number that must all be read alike."""
    sign = value.as_tuple().sign
    if draw(st.booleans()):
        body = f"{abs(value):{draw(st.sampled_from('eE'))}}"
    else:
        body = f"{abs(value):{draw(st.sampled_from(['f', ',f']))}}"
        zeros = "0" * draw(st.integers(0, 3))
        body += zeros if "." in body else draw(st.sampled_from(["", "." + zeros]))
        body = body[1:] if body.startswith("0.") and draw(st.booleans()) else body
    minus = draw(st.sampled_from(["-", "- ", "\u2212", "\u2212 "] if sign else ["", "+"]))
    currency = draw(st.sampled_from(["", "$", "$ ", "\u20ac", "\u00a3", "\u00a5", "\u20b9"]))
    unit = draw(st.sampled_from(["", ".", "%", " apples", " km/h.", "\u4e2a"]))
    text = draw(st.sampled_from([minus + currency, currency + minus])) + body + unit
    return text.translate(FULL_WIDTH) if draw(st.booleans()) else text


NUMBERS = st.decimals(-(10**12), 10**12, places=3, allow_nan=False) | st.integers(-(10**12), 10**12).map(Decimal)


@pytest.mark.parametrize(
    "response, gold",
    [
        ("#### 1,234", "1234"),
        ("#### 1234", "1,234"),
        ("#### 18.", "18"),
        ("#### 18.00", "18"),
        ("#### $18", "18"),
        ("#### 18 dollars", "18"),
        ("#### 18 km/h.", "18"),
        ("#### -5", "-5"),
        ("#### - 5", "-5"),
        ("#### \u22125", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5", "5"),
        ("#### \uff15\uff10", "50"),
        ("####18", "18"),
        ("#### .5", "0.5"),
        ("#### 1e3", "1000"),
        ("#### 72%", "72"),
        ("#### 3\nno, wait\n#### 4", "4"),
        ("16 - 3 = <<16-3=13>>13\n#### 13\n", "13"),
        ("#### 18\n\nThat took 2 steps.", "18"),
        ("#### 109,200,000", "109200000"),
        ("#### 0", "-0"),
        ("#### \uffe5\uff11\uff0c\uff12\uff13\uff14", "1234"),
    ],
)
def test_right_answers_get_1(response, gold):
    assert reward(response, gold) == 1.0


@pytest.mark.parametrize(
    "response, gold",
    [
        ("#### 1e3", "1"),
        ("#### 2/3", "2"),
        ("#### 2/3", "0.6667"),
        ("#### 3\n#### 4", "3"),
        ("#### 4\n####", "4"),
        ("the answer is 18", "18"),
        ("### 18", "18"),
        ("####\n18", "18"),
        ("#### eighteen", "18"),
        ("#### x = 18", "18"),
        ("#### 1,2", "12"),
        ("#### 1,2", "1"),
        ("#### 1,2345", "12345"),
        ("#### 1234,567", "1234567"),
        ("#### 10-12", "10"),
        ("#### 5:30", "5"),
        ("#### 1.2.3", "1.2"),
        ("#### 18 + 2 = 20", "18"),
        ("#### 18 or 19", "18"),
        ("#### 18\u00bd", "18"),
        ("#### 5\u00b2", "5"),
        ("#### 5\u00b2", "52"),
        ("#### 2 million", "2"),
        ("#### --5", "-5"),
        ("#### -+5", "-5"),
        ("#### 0.1000000000000000055", "0.1"),
        ("", "18"),
        ("####", "18"),
    ],
)
def test_wrong_or_unmarked_answers_get_0(response, gold):
    assert reward(response, gold) == 0.0


@pytest.mark.parametrize(
    "response, number",
    [
        ("the answer is 18", "18"),
        ("So she makes $1,080.00 a day.", "1080"),
        ("It takes 2 steps.\nThe answer is -5.\n\nThat is all!", "-5"),
        ("so \u22125", "-5"),
        ("x = - 5", "-5"),
        ("- 5", "-5"),
        ("it is .5", "0.5"),
        ("about 1e3 of them", "1000"),
        ("18 or 19", "19"),
        ("3, 4, 18", "18"),
        ("In 2020, 18", "18"),
        ("It was 5. 18 are left", "18"),
        ("16 - 3 = 13", "13"),
        ("16-3=<<16-3=13>>13 eggs", "13"),
        ("20 is 18 + 2, or 10 * 2 = 20", "20"),
        ("5\n18", "18"),
        ("\\boxed{18}", "18"),
        ("\\boxed{\\$1,234}", "1234"),
        ("\\(x = 18\\)", "18"),
        ("$$18$$", "18"),
        ("$-5$", "-5"),
        ("**18**", "18"),
        ("5 are **18**", "18"),
        ("### Answer: 18", "18"),
        ("Answer:18", "18"),
        ("Answer \u2013 18", "18"),
        ("1. 18", "18"),
        ("[18]", "18"),
        ("US$18", "18"),
        ("18 km/h", "18"),
        ("72%", "72"),
        ("\u7b54\u6848\u662f\uff11\uff18\u4e2a\u3002", "18"),
        ("\u7b54\u6848\uff1a18", "18"),
    ],
)
def test_without_a_marker_flexible_takes_the_last_number(response, number):
    assert reward(response, number, mode="flexible") == 1.0
    assert reward(response, str(Decimal(number) + 1), mode="flexible") == 0.0
    assert reward(response, number, mode="strict") == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "18 in all, 2/3 of them red",
        "18 or 2 1/2",
        "18 = 1 1/2",
        "18, so 10-12",
        "18, so 10 - 12",
        "18, so 10\u201312",
        "18, so 10 \u2013 12",
        "18, so 10%\u201312%",
        "18 at 5:30",
        "18 or 1,2",
        "18 or 1.2.3",
        "18 or 17 + 1",
        "18 or 9 * 2",
        "18 or (5 + 4) * 2",
        "18 or (5 + 4)-2",
        "18 is 50% - 30%",
        "18 or 10%-12%",
        "18 or 1 234",
        "18 or 5\u00bd",
        "18 or 5\u00b2",
        "18 or 2 million",
        "18 or --5",
        "18 on 12/25/2020",
        "18 of x2",
        "18 of COVID-19",
        "18 or Rs.5",
        "18 or 2^3",
        "18 or x^{2}",
        "18 or x_2",
        "18 or \\frac{1}{2}",
        "18 or \\dfrac12",
        "18 or \u221a2",
        "18 or 1{,}234",
        "18, then e5",
        "18, 2**3",
        "eighteen",
        "\u00bd",
        "",
    ],
)
def test_what_is_no_number_is_none_for_flexible_either_and_no_earlier_one_steps_in(response):
    assert parse_last_number(response) is None
    assert reward(response, "18", mode="flexible") == 0.0


@pytest.mark.parametrize("response, gold", [("#### 4\n####", "4"), ("#### 4\nso 18", "18"), ("18\n#### x = 18", "18")])
def test_with_a_marker_flexible_is_strict(response, gold):
    assert reward(response, gold, mode="flexible") == reward(response, gold, mode="strict") == 0.0
    assert reward("so 18\n" + response + " 18\n#### 4\n19", "4", mode="flexible") == 1.0


def test_a_mode_of_another_name_is_refused():
    assert options_model(gsm8k).model_validate({"mode": "flexible"}).mode == "flexible"
    with pytest.raises(ValidationError, match="'strict' or 'flexible'"):
        options_model(gsm8k).model_validate({"mode": "loose"})


def test_a_truncated_response_is_judged_by_its_text_alone():
    assert reward("#### 18", "18", status=Status.TRUNCATED) == 1.0
    assert reward("so we get 18", "18", status=Status.TRUNCATED) == 0.0


@pytest.mark.parametrize("gold", ["18", str(18.0), "#### 18", "9*2 = <<9*2=18>>18\n#### 18", "18 dollars"])
def test_every_way_to_give_the_gold_is_the_same(gold):
    assert reward("#### 18", gold) == 1.0
    assert reward("#### 19", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "eighteen", "2/3", "####", "the answer is 18"])
def test_a_gold_that_is_no_number_is_an_error_and_not_a_0(gold):
    with pytest.raises(ValueError, match="answer"):
        reward("#### 18", gold)


@settings(deadline=None, max_examples=300)
@given(st.data(), NUMBERS)
def test_every_spelling_of_the_gold_scores_it_and_no_other_number_does(data, number):
    response, gold = data.draw(spellings(number)), data.draw(spellings(number))
    other = data.draw(spellings(data.draw(NUMBERS.filter(lambda drawn: drawn != number))))
    for text in ("#### {}", "#### 7\n####{}", "<<3*4=12>>12\n#### {}\n\nThat took 2 steps."):
        for mode in ("strict", "flexible"):
            assert reward(text.format(response), gold, mode=mode) == 1.0
            assert reward(text.format(response), other, mode=mode) == 0.0
    for text in ("{}", "3 * 4 = 12, so it is {}", "After 2 steps:\n{}\nThat is it.", "**{}**", "\\boxed{{{}}}", "= {}"):
        assert reward(text.format(response), gold, mode="flexible") == 1.0
        assert reward(text.format(response), other, mode="flexible") == 0.0
        assert reward(text.format(response), gold, mode="strict") == 0.0


def test_answers_in_the_data_sets_own_format_score_themselves(tmp_path):
    toy.write_gsm8k_like(tmp_path / "a.jsonl", 100, seed=0)
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert reward(answer, answer) == 1.0
        assert reward(answer + "1", answer) == 0.0


@settings(deadline=None, max_examples=500)
@given(st.text(st.characters()) | st.text("0123456789,.-+*$%eE/#={}^ \n\t\u2212\uff15\u00bd\u0660\u2013\ud800x"))
def test_no_model_text_raises(text):
    for response in (text, "#### " + text):
        for mode in ("strict", "flexible"):
            assert reward(response, "18", mode=mode) in (0.0, 1.0)


@pytest.mark.parametrize("mode", ["strict", "flexible"])
@pytest.mark.parametrize("marker", ["", "#### "])
@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_a_long_text_without_an_answer_takes_below_50_ms(text, marker, mode):
    times = []
    for _ in range(3):
        start = time.perf_counter()
        value = reward(marker + text, "18", mode=mode)
        times.append(time.perf_counter() - start)
    assert value == 0.0 and min(times) < 0.05


def test_numbers_are_exact():
    assert parse_number("0.1") + parse_number("0.2") == parse_number("0.3")
    assert parse_number("9007199254740993") != parse_number("9007199254740992")  # equal as floats
