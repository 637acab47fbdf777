"""GSM8K's rule: every answer format that was once scored wrongly somewhere, and the choices made."""

import json
import random

import pytest

from megarl.data import toy
from megarl.rewards.gsm8k import gsm8k, parse_number
from megarl.sample import Prompt, Sample, Status


def reward(response, gold, status=Status.COMPLETED):
    prompt = Prompt(messages=[], token_ids=[1], answer=gold)
    return gsm8k(Sample.from_response(prompt, [2], group_id=0, index=0, response_text=response, status=status))


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


def test_a_gold_scores_itself_and_no_other_number_scores_it():
    generator = random.Random(0)
    for _ in range(500):
        number = generator.randint(-(10**9), 10**9)
        forms = [f"{number}", f"{number:,}", f"{number}.0", f"${number:,}.00", f"{number} apples", f"{number:,}%"]
        for form in forms:
            assert reward(f"#### {form}", form) == 1.0
            assert reward(f"#### {form}", str(number)) == 1.0
            assert reward(f"#### {form}", str(number + 1)) == 0.0


def test_answers_in_the_data_sets_own_format_score_themselves(tmp_path):
    toy.write_gsm8k_like(tmp_path / "a.jsonl", 100, seed=0)
    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert reward(answer, answer) == 1.0
        assert reward(answer + "1", answer) == 0.0


def test_no_model_text_raises_or_takes_long():
    generator = random.Random(0)
    alphabet = "0123456789,.-+$%eE/# \n\t\u2212\uff15\u00bd\u0660x"
    texts = ["".join(generator.choices(alphabet, k=generator.randint(0, 40))) for _ in range(5_000)]
    texts += ["-" + " " * 200_000 + "x", "1," * 100_000, "9" * 200_000, "1e999999999", "1e" + "9" * 100, "#" * 200_000]
    for text in texts:
        assert reward("#### " + text, "18") in (0.0, 1.0)


def test_numbers_are_exact():
    assert parse_number("0.1") + parse_number("0.2") == parse_number("0.3")
    assert parse_number("9007199254740993") != parse_number("9007199254740992")  # equal as floats
