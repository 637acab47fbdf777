"""The quality report: each planted fault is found by one check, with its line, and nothing else is."""

import argparse
import json
import os
import random
from pathlib import Path

import pytest

from megarl import data_report
from megarl.data import near_duplicates, toy
from megarl.data.columns import USUAL_NAMES
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
SYLLABLES = ("ba", "de", "fi", "go", "lu", "ma", "ne", "pi", "ro", "su", "ta", "ve")
WORDS = [first + second + third for first in SYLLABLES for second in SYLLABLES for third in ("", "n", "rt")]


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
    keys = {what: options.get(what) for what in USUAL_NAMES}
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
        "bad",
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
    ("samples", lambda rows: replaced(rows, reward=10**400), "rows", "bad", f"{PLACE} reward: wanted a finite number"),
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
        lambda rows: [row | {"reward": float(i >= 39)} for i, row in enumerate(rows)],
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
    assert any(says in line for line in lines), lines


def test_rows_of_parquet_are_named_by_number_and_columns_by_option(tmp_path):
    rows = replaced([row | {"id": row["question"]} for row in clean_rows("rl")], id=" ")
    path = tmp_path / "data.parquet"
    to_parquet(write(tmp_path / "a.jsonl", rows), path)
    assert checks(path)["rows"].verdict == "ok"
    assert f"{path}:row {FAULTY + 1}: id: empty user text" in checks(path, prompt="id")["rows"].details[0]


def test_columns_of_usual_names_are_taken_and_others_refused(tmp_path):
    def columns(row, **keys):
        path = write(tmp_path / "data.jsonl", [row])
        return str(read_file(str(path), dict.fromkeys(USUAL_NAMES) | keys, None, None).columns)

    assert columns({"problem": "a", "solution": "1"}) == "prompt in 'problem', answer in 'solution'"
    both = {"prompt": "a", "chosen": "b", "rejected": "c", "response": "d"}
    assert columns(both) == "prompt in 'prompt', chosen in 'chosen', rejected in 'rejected'"
    assert columns(both, response="response") == "prompt in 'prompt', response in 'response'"
    assert columns({"messages": "a", "completion": "b", "score": 1}) == (
        "prompt in 'messages', reward in 'score', response in 'completion'"
    )
    assert columns({"prompt": "a", "score": "B+"}) == "prompt in 'prompt'"
    for row, keys, error in (
        ({"text": "a"}, {}, "no column of prompts, as prompt, question.*; columns: text; valid: --prompt-key"),
        ({"prompt": "a"}, {"answer": "gold"}, r"no column gold \(--answer-key\); columns: prompt"),
        ({"prompt": "a", "chosen": "b"}, {"chosen": "chosen"}, "--chosen-key and --rejected-key go together"),
        ({}, {}, "data.jsonl: no rows"),
    ):
        with pytest.raises(ConfigError, match=error):
            columns(row, **keys)


def record(source, prompt, **fields):
    return Record(source, prompt, len(prompt), **fields)


def test_held_out_prompts_that_are_trained_on_are_named_with_the_row_that_is():
    texts = [row["question"] for row in clean_rows("rl")]
    train = [record(f"train:{i}", text) for i, text in enumerate(texts[:30])]
    held_out = [record(f"test:{i}", text) for i, text in enumerate(texts[30:])]
    assert [check.verdict for check in leaks(held_out, train)] == ["ok", "ok"]
    exact, near = leaks([*held_out, record("test:x", texts[7].upper())], train)
    assert (exact.verdict, near.verdict) == ("bad", "ok") and exact.details[0].startswith("test:x = train:7: ")
    exact, near = leaks([*held_out, record("test:x", changed_word(texts[7]))], train)
    assert (exact.verdict, near.verdict) == ("ok", "look") and near.details[0].startswith("test:x ~ train:7 (0.")


@pytest.mark.parametrize("num_constant, verdict", [(5, "ok"), (6, "look"), (9, "look"), (10, "bad")])
def test_groups_without_spread_are_judged_by_their_share(num_constant, verdict):
    rows = [(i, j * (i >= num_constant)) for i in range(10) for j in (0, 1)]
    records = [record(f"row {i}", f"prompt {i}", reward=float(reward)) for i, reward in rows]
    (check,) = reward_groups(records)
    assert check.verdict == verdict
    assert check.finding.startswith(f"{num_constant} of 10 groups")
    assert list(reward_groups(records[::2])) == []


def test_similarity_is_that_of_the_sets_of_three_words_with_signs_as_words():
    assert shingles("One, two  THREE?") == {"one , two", ", two three", "two three ?"}
    assert shingles("今日は晴れ") == {"今 日 は", "日 は 晴", "は 晴 れ"}
    assert shingles("５ apples") == {"5 apples"} and shingles("") == {""}
    assert jaccard(shingles("a b c d e"), shingles("a b c d f")) == 2 / 4
    assert jaccard(shingles("2 + 3 ="), shingles("2 - 3 =")) == 0.0


def brute_force(texts):
    """The same by comparing all with all."""
    kept, matches = [], []
    for i, text in enumerate(texts):
        other = next((j for j in kept if jaccard(shingles(text), shingles(texts[j])) >= 0.8), None)
        kept += [i] if other is None else []
        matches += [] if other is None else [(i, other)]
    return matches


def test_nearly_all_near_duplicates_of_comparing_all_with_all_are_found_and_no_others():
    generator = random.Random(2)
    texts = [" ".join(generator.choices(WORDS, k=30)) for _ in range(150)]
    for i in range(100):  # with one to four words changed: similarities around 0.8
        words = texts[i].split()
        for _ in range(i % 4 + 1):
            words[generator.randrange(30)] = "otherwise"
        texts.append(" ".join(words))
    expected = brute_force(texts)
    found = search_within(texts)
    assert found.num_searched == 250 and found.limits == ()
    pairs = {(match.index, match.other) for match in found.matches}
    # With one word changed they are at 25 / 31, which is found with a probability of 0.989.
    assert pairs <= set(expected) and len(pairs) > 0.9 * len(expected) > 20
    between = search_between(texts[150:], texts[:150])
    assert {(match.index + 150, match.other) for match in between.matches} == pairs


def test_texts_without_spaces_are_near_by_their_characters():
    text = "小明有五个苹果他给了小红两个请问小明还剩下几个苹果"
    (match,) = search_within([text, text[::-1], text[:-1] + "梨"]).matches
    assert (match.index, match.other) == (2, 0) and match.jaccard == 22 / 23  # 个苹果 is there twice


def test_a_search_that_a_limit_ends_says_which(monkeypatch):
    texts = [row["question"] for row in clean_rows("rl")]
    assert search_within(texts).limits == search_between(texts, texts).limits == ()
    monkeypatch.setattr(near_duplicates, "MAX_TEXTS", 10)
    drawn = search_within(texts)
    assert drawn.num_searched == 10 and drawn.limits == ("at most 10 texts and 50,000,000 characters, drawn at random",)
    assert search_within(texts[:10]).limits == ()
    assert search_between(texts[:5], texts).limits == ("among 10 of 40",)
    monkeypatch.setattr(near_duplicates, "MAX_CHARACTERS", 3 * max(map(len, texts)))
    assert 3 <= search_within(texts).num_searched < 10
    monkeypatch.setattr(near_duplicates, "MAX_COMPARISONS", 1)
    similar = search_within([texts[0] + f" {word}" for word in ("a", "b", "c")])
    assert similar.num_searched == 2 and similar.limits[-1] == "at most 1 comparisons"


@pytest.mark.parametrize(
    "text, kind",
    [
        ("tab\tline\r\n, caf\u00e9, \u0645\u06cc\u200c\u062e, \U0001f468\u200d\U0001f469, 5\u00a0km", None),
        ("a\u200bb", "invisible character"),
        ("ab\u200db", "invisible character"),
        ("\ufeffa", "invisible character"),
        ("a\x00", "control character"),
        ("a\x1b[0m", "control character"),
        ("a\ufffd", "replacement character"),
        ("itâ€™s", "UTF-8 read as Latin-1"),
        ("cafÃ©", "UTF-8 read as Latin-1"),
    ],
)
def test_odd_characters(text, kind):
    found = odd_character(text)
    assert (None if found is None else found[1]) == kind


@pytest.mark.parametrize(
    "text, place",
    [("50", None), ("５０", 0), ("a５", 1), ("1，2", 1), ("一，二。", None), ("一，２", 2), ("", None), ("é", None)],
)
def test_full_width_signs_are_odd_but_among_east_asian_characters(text, place):
    assert full_width_place(text) == place


@pytest.mark.parametrize(
    "first, second, same",
    [
        ("18", "18.0", True),
        ("1,234", "#### 1234", True),
        ("９", "9", True),
        ("so 2\n#### 4", "\\boxed{4}", True),
        ("Paris ", "paris", True),
        ("18", "-18", False),
        ("\\frac{1}{2}", "\\frac{1}{3}", False),
        ("so 4\n#### 2", "so 4", False),
    ],
)
def test_answers_are_compared_by_what_they_end_with(first, second, same):
    assert (comparable_answer(first) == comparable_answer(second)) is same


def test_an_answer_is_no_fault_for_being_a_text_among_texts():
    assert answer_fault("blue", is_number_expected=False) is None
    assert answer_fault("steps\n#### 18 dollars", is_number_expected=True) is None


def test_fences_are_three_quartile_distances_on_a_logarithmic_scale():
    lengths = [190] * 4 + [390] * 4  # quartiles 200 and 400, ten added
    assert fences(lengths) == (200 / 2**3 - 10, 400 * 2**3 - 10)
    assert fences([1] * 9) == (0, 27)  # 11 * 1.5**3 - 10 = 27.1
    assert fences([]) == (0, 0)


def test_a_histogram_has_a_bar_per_value_or_per_range_and_counts_all():
    assert [line.split() for line in histogram([0.0, 1.0, 1.0])] == [["0", "#" * 20, "1"], ["1", "#" * 40, "2"]]
    lengths = [*range(1, 101), 5000]
    lines = [line.split() for line in histogram(lengths)]
    assert [line[:3] for line in lines[:2]] == [["1", "to", "10"], ["11", "to", "20"]]
    assert lines[-1][:2] == ["above", "100"] and lines[-1][-1] == "1"
    assert sum(int(line[-1]) for line in lines) == 101
    assert sum(int(line.split()[-1]) for line in histogram([i / 7 for i in range(50)])) == 50
    assert distribution(lengths, "tokens")[0] == "tokens: min 1, p50 51, p90 91, p99 100, max 5,000"


def test_a_quote_shows_the_place_and_what_cannot_be_seen():
    assert quote("a\u200bb\n") == "'a\\u200bb\\n'"
    assert quote("x" * 100 + "!" + "y" * 100, place=100) == "...'" + "x" * 30 + "!" + "y" * 29 + "'..."


def run(*arguments):
    """(exit code, lines)."""
    parser = argparse.ArgumentParser()
    data_report.add_arguments(parser)
    lines = []
    code = data_report.run(parser.parse_args([str(argument) for argument in arguments]), lines.append)
    return code, "\n".join(lines).split("\n")


def verdicts(lines):
    """(check, file) -> verdict; no file where the report is on one."""
    table = [line.split("  ") for line in lines[lines.index("== verdicts") + 1 : -1]]
    table = [[part.strip() for part in line if part.strip()] for line in table]
    return {(name, rest[0] if len(rest) > 1 else ""): verdict for verdict, name, *rest in table}


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "toy"
    toy.make(folder, seed=0)
    return folder


def config_of(tmp_path, folder, train, validation, warm_start):
    files = {"train.jsonl": train, "validation.jsonl": validation, "warm_start.jsonl": warm_start}
    for name, rows in files.items():
        write(tmp_path / name, rows)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"device: cpu\nmodel: {{path: {folder}/model, dtype: float32}}\n"
        "data: {train: train.jsonl, validation: validation.jsonl, prompt_key: question, max_prompt_tokens: 120}\n"
        "warm_start: {data: warm_start.jsonl}\nalgorithm: {reward: gsm8k}\n"
        "rollout: {sampling: {max_new_tokens: 16}}\n"
    )
    return path


def test_a_config_reports_on_all_its_data_in_tokens_with_leaks(tmp_path, toy_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = (toy_folder / "train.jsonl").read_text().splitlines()[:60]
    rows = [json.loads(line) for line in lines]
    warm_start = [{"question": row["question"], "response": "I guess 5"} for row in rows[:20]]
    train, held_out = rows[:30], rows[30:]
    code, lines = run(config_of(tmp_path, toy_folder, train, [*held_out, rows[3]], warm_start))
    assert code == 1 and all(len(line) <= data_report.WIDTH for line in lines)
    assert [line for line in lines if line.startswith("== ")] == [
        "== data.train: train.jsonl",
        "== warm_start.data: warm_start.jsonl",
        "== data.validation: validation.jsonl",
        "== verdicts",
    ]
    assert lines.count("prompt in 'question', answer in 'answer'; lengths of prompts in tokens") == 2
    found = verdicts(lines)
    assert [check for check, verdict in found.items() if verdict == "bad"] == [("leaks", "validation.jsonl")]
    assert any(line.strip().startswith("validation.jsonl:31 = train.jsonl:4:") for line in lines)
    assert ("overlong prompts", "warm_start.jsonl") in found and ("leaks", "train.jsonl") not in found
    assert lines[-1].endswith("1 bad")

    constant = config_of(tmp_path, toy_folder, [row | {"reward": 0.5} for row in train], held_out, warm_start)
    found = verdicts(run(constant)[1])
    assert found["rewards", "train.jsonl"] == "bad" and ("rewards", "validation.jsonl") not in found

    config = config_of(tmp_path, toy_folder, train, held_out, replaced(warm_start, question="7" * 113))
    code, lines = run(config, "data.system_prompt=null")
    found = verdicts(lines)
    assert code == 1 and found["overlong prompts", "warm_start.jsonl"] == "bad"
    assert any(f"warm_start.jsonl:{FAULTY + 1}: 121 tokens:" in line for line in lines)


def test_a_file_is_counted_in_tokens_of_a_tokenizer_where_one_is_given(tmp_path, toy_folder):
    rows = [{"prompt": "7" * 42, "answer": "7"}, {"prompt": "7" * 43, "answer": "7"}]  # with 8 of the template
    path = write(tmp_path / "data.jsonl", rows)
    found = checks(path, tokenizer=toy_folder / "model", max_prompt_tokens=50)
    assert found["overlong prompts"].finding == "1 of 2 prompts > 50 tokens (50.0%)"
    assert found["prompt length"].details[0].startswith("tokens: min 50, ")


def test_the_exit_code_is_0_unless_a_check_is_bad_and_conversion_prints_what_it_wrote(tmp_path):
    path = write(tmp_path / "data.jsonl", clean_rows("rl"))
    code, lines = run(path)
    assert code == 0 and lines[-1].endswith("9 ok, 0 to look at, 0 bad") and set(verdicts(lines).values()) == {"ok"}
    assert run(path, "--to-parquet", tmp_path / "b.parquet") == (0, [f"wrote 40 rows to {tmp_path / 'b.parquet'}"])
    assert run(tmp_path / "b.parquet", "--to-jsonl", tmp_path / "c.jsonl")[0] == 0
    assert (tmp_path / "c.jsonl").read_text() == path.read_text()
    code, lines = run(write(path, ["{"] * 12 + clean_rows("rl")))
    assert code == 1 and sum("not JSON" in line for line in lines) == 10
    assert any("... and 2 more" in line for line in lines)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["config.yaml", "--prompt-key", "x"], "--prompt-key is for a data file, given the config config.yaml"),
        (["config.yml", "--to-jsonl", "x"], "--to-jsonl is for a data file"),
        (["data.jsonl", "seed=2"], "seed=2: keys are of a config, given the data file data.jsonl"),
        (["data.jsonl", "--to-jsonl", "b.jsonl", "--answer-key", "x"], "a conversion takes no other option"),
        (["data.jsonl", "--max-prompt-tokens", "9"], "--max-prompt-tokens 9: wants --tokenizer"),
        (["data.jsonl", "--tokenizer", "x", "--max-prompt-tokens", "0"], "--max-prompt-tokens 0: wanted 1 or more"),
        (["none.jsonl"], "none.jsonl: no such file"),
    ],
)
def test_options_that_would_not_be_read_are_refused(tmp_path, monkeypatch, arguments, error):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "data.jsonl", clean_rows("rl"))
    with pytest.raises(ConfigError, match=error):
        run(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


@pytest.mark.skipif(not os.environ.get("MEGARL_GSM8K"), reason="MEGARL_GSM8K names the folder of GSM8K's files")
def test_gsm8k_has_one_near_duplicate_and_two_zero_width_spaces():
    folder = Path(os.environ["MEGARL_GSM8K"])
    for name, num_near, place in (("train", 1, "train.jsonl:7389: prompt"), ("test", 0, "test.jsonl:394: answer")):
        found = checks(folder / f"{name}.jsonl")
        assert [check.name for check in found.values() if check.verdict != "ok"] == ["odd characters"]
        assert found["near-duplicates"].finding.startswith(f"{num_near} of ")
        assert place in found["odd characters"].details[1]
