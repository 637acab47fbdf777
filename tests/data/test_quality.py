"""The quality report: each planted fault is found by one check, with its line, and nothing else is."""

import argparse
import json
import os
import random
from pathlib import Path

import pytest

from megarl import data_report
from megarl.data import near_duplicates, toy
from megarl.data.convert import to_parquet
from megarl.data.findings import distribution, fences, histogram, quote
from megarl.data.near_duplicates import jaccard, search_between, search_within, shingles
from megarl.data.odd_text import answer_fault, comparable_answer, full_width_place, odd_character
from megarl.data.quality import Record, leaks, reward_groups
from megarl.data.tables import read_file
from megarl.errors import ConfigError

NUM_ROWS = 40
FAULTY = 17  # the row with the planted fault, from 0
PLACE = f"data.jsonl:{FAULTY + 1}:"
WORDS = (Path(__file__).parents[2] / "README.md").read_text().lower()
WORDS = sorted({word for word in WORDS.split() if word.isalpha()})


def clean_rows(kind):
    """Rows that no check has anything against: `rl` with answers, `sft`, `pairs`, or `samples` with rewards, in groups
    of four."""
    generator = random.Random(1)

    def text(low, high):
        return " ".join(generator.choices(WORDS, k=generator.randint(low, high)))

    if kind == "rl":
        return [{"question": text(15, 25) + "?", "answer": str(generator.randint(1, 99))} for _ in range(NUM_ROWS)]
    if kind == "sft":
        return [{"prompt": text(15, 25), "response": text(10, 30)} for _ in range(NUM_ROWS)]
    if kind == "pairs":
        return [{"prompt": text(15, 25), "chosen": text(10, 30), "rejected": text(10, 30)} for _ in range(NUM_ROWS)]
    prompts = [text(15, 25) for _ in range(NUM_ROWS // 4)]
    rewards = [round(generator.random(), 2) for _ in range(NUM_ROWS)]
    return [
        {"messages": [{"role": "user", "content": prompts[i // 4]}], "response": text(10, 30), "reward": rewards[i]}
        for i in range(NUM_ROWS)
    ]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def checks(path, **options):
    keys = {what: options.get(what) for what in data_report.KEYS}
    table = read_file(str(path), keys, options.get("tokenizer"), options.get("max_prompt_tokens"))
    return {check.name: check for check in data_report.checks_of(table, [table])}


def replaced(rows, **columns):
    """The rows with columns of the faulty one replaced."""
    return [*rows[:FAULTY], rows[FAULTY] | columns, *rows[FAULTY + 1 :]]


def changed_word(text):
    """The text with another last word."""
    return text.rpartition(" ")[0] + " otherwise"


@pytest.mark.parametrize("kind", ["rl", "sft", "pairs", "samples"])
def test_clean_rows_are_ok_in_all(tmp_path, kind):
    found = checks(write(tmp_path / "data.jsonl", clean_rows(kind)))
    assert {name: check.finding for name, check in found.items() if check.verdict != "ok"} == {}
    of_kind = {
        "rl": {"contradictions", "empty answers", "odd answers"},
        "sft": {"empty responses", "response length"},
        "pairs": {"empty responses", "response length", "equal pairs"},
        "samples": {"empty responses", "response length", "rewards", "reward groups"},
    }
    of_all = {"rows", "duplicates", "near-duplicates", "prompt length", "character width", "odd characters"}
    assert set(found) == of_all | of_kind[kind]


FAULTS = [  # kind of rows, what is planted, the check that finds it, its verdict, what it says
    ("rl", lambda rows: [*rows[:FAULTY], "{oops", *rows[FAULTY:]], "rows", "bad", f"{PLACE} not JSON"),
    ("rl", lambda rows: replaced(rows, question=None), "rows", "bad", f"{PLACE} no column question"),
    ("rl", lambda rows: replaced(rows, question=" "), "rows", "bad", f"{PLACE} question: empty user text"),
    ("rl", lambda rows: replaced(rows, answer=[1]), "rows", "bad", f"{PLACE} answer: wanted a text"),
    (
        "rl",
        lambda rows: replaced(rows, question="  " + rows[3]["question"].upper(), answer=rows[3]["answer"] + ".0"),
        "duplicates",
        "look",
        f"data.jsonl:{FAULTY + 1} = data.jsonl:4:",
    ),
    ("rl", lambda rows: rows + rows[:5], "duplicates", "bad", "data.jsonl:41 = data.jsonl:1:"),
    (
        "rl",
        lambda rows: replaced(rows, question=rows[3]["question"].upper(), answer="100"),
        "contradictions",
        "bad",
        f"data.jsonl:{FAULTY + 1} '100' against data.jsonl:4 ",
    ),
    (
        "rl",
        lambda rows: replaced(rows, question=changed_word(rows[3]["question"])),
        "near-duplicates",
        "look",
        f"data.jsonl:{FAULTY + 1} ~ data.jsonl:4 (0.",
    ),
    ("rl", lambda rows: replaced(rows, question=" ".join(WORDS)), "prompt length", "look", f"{PLACE} "),
    ("rl", lambda rows: replaced(rows, question="?"), "prompt length", "look", f"{PLACE} 1 characters: '?'"),
    ("rl", lambda rows: replaced(rows, answer=None), "empty answers", "bad", PLACE),
    ("rl", lambda rows: replaced(rows, answer=" \n"), "empty answers", "bad", PLACE),
    ("rl", lambda rows: replaced(rows, answer="N/A"), "odd answers", "look", f"{PLACE} a placeholder: 'N/A'"),
    ("rl", lambda rows: replaced(rows, answer="..."), "odd answers", "look", f"{PLACE} only punctuation"),
    ("rl", lambda rows: replaced(rows, answer="blue"), "odd answers", "look", f"{PLACE} no number, as most have"),
    ("rl", lambda rows: replaced(rows, answer=" 5"), "odd answers", "look", f"{PLACE} white space around it: ' 5'"),
    ("rl", lambda rows: replaced(rows, answer="5 " + "x" * 90), "odd answers", "look", f"{PLACE} far longer than"),
    ("rl", lambda rows: [row | {"answer": "?"} for row in rows[:3]] + rows[3:], "odd answers", "bad", "data.jsonl:1:"),
    ("rl", lambda rows: replaced(rows, answer="５０"), "character width", "look", f"{PLACE} answer: '５０'"),
    (
        "rl",
        lambda rows: replaced(rows, question=rows[FAULTY]["question"] + "！"),
        "character width",
        "look",
        f"{PLACE} prompt: ...",
    ),
    (
        "rl",
        lambda rows: replaced(rows, question=rows[FAULTY]["question"] + "\u200b"),
        "odd characters",
        "look",
        f"{PLACE} prompt: invisible character: ...",
    ),
    ("rl", lambda rows: replaced(rows, answer="5\ufffd"), "odd characters", "bad", "answer: replacement character: '5"),
    ("sft", lambda rows: replaced(rows, response=""), "empty responses", "bad", PLACE),
    ("sft", lambda rows: replaced(rows, response=None), "empty responses", "bad", PLACE),
    ("sft", lambda rows: replaced(rows, response="a " * 9000), "response length", "look", f"{PLACE} 18,000 characters"),
    ("sft", lambda rows: replaced(rows, response="yes"), "response length", "look", f"{PLACE} 3 characters: 'yes'"),
    ("pairs", lambda rows: replaced(rows, chosen="\t"), "empty responses", "bad", PLACE),
    ("pairs", lambda rows: replaced(rows, rejected=rows[FAULTY]["chosen"].upper()), "equal pairs", "bad", PLACE),
    ("samples", lambda rows: replaced(rows, reward=float("nan")), "rows", "bad", f"{PLACE} reward: wanted a finite"),
    ("samples", lambda rows: replaced(rows, reward="1"), "rows", "bad", f"{PLACE} reward: wanted a finite number"),
    (
        "samples",
        lambda rows: [row | {"reward": i // 4 / 10 if i < 24 else row["reward"]} for i, row in enumerate(rows)],
        "reward groups",
        "look",
        "data.jsonl:1: 4 times 0:",
    ),
    (
        "samples",
        lambda rows: [row | {"reward": float(i >= 39)} for i, row in enumerate(rows * 1)],
        "rewards",
        "look",
        "from 0 to 1, mean 0.025; 97.5% at the lowest, 2.5% at the highest",
    ),
]


@pytest.mark.parametrize("kind, plant, name, verdict, says", FAULTS)
def test_a_planted_fault_is_found_by_its_check_alone(tmp_path, monkeypatch, kind, plant, name, verdict, says):
    monkeypatch.chdir(tmp_path)
    found = checks(write(Path("data.jsonl"), plant(clean_rows(kind))))
    if name == "rewards":  # hardly any reward is hardly any spread within groups
        assert found.pop("reward groups").verdict == "look"
    assert {check.name: check.verdict for check in found.values() if check.verdict != "ok"} == {name: verdict}
    lines = [found[name].finding, *found[name].details]
    assert any(line.startswith(says) or says in line and not says.startswith(PLACE) for line in lines), lines
