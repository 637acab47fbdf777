"""The toy task: its text, its tokenizer, its model, and how its folder is written."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from megarl.data import chat, toy
from megarl.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return chat.load_tokenizer(folder / "model")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_python(code, *arguments, hash_seed="0"):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, timeout=60)


def test_importing_loads_nothing_heavy_and_making_loads_no_torch(tmp_path):
    code = """
import sys
from megarl.data import toy
assert not {"torch", "transformers", "numpy", "tokenizers"} & set(sys.modules)
toy.make(sys.argv[1], 0)
assert not {"torch", "transformers"} & set(sys.modules)
"""
    result = run_python(code, tmp_path / "toy")
    assert result.returncode == 0, result.stderr


def test_same_seed_gives_same_bytes_in_another_process(folder, tmp_path):
    code = "import sys; from megarl.data import toy; toy.make(sys.argv[1], 0)"
    assert run_python(code, tmp_path / "again", hash_seed="7").returncode == 0
    for name in toy.FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


def test_another_seed_gives_other_weights_and_rows_but_the_same_tokenizer(folder, tmp_path):
    toy.make(tmp_path / "other", seed=1)
    for name in ("model/model.safetensors", "train.jsonl", "warm_start.jsonl", "preferences.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() != (folder / name).read_bytes(), name
    name = "model/tokenizer.json"
    assert (tmp_path / "other" / name).read_bytes() == (folder / name).read_bytes()


def test_a_complete_folder_is_left_alone(folder):
    before = {name: (folder / name).stat().st_mtime_ns for name in toy.FILES}
    toy.make(folder, seed=0)
    assert {name: (folder / name).stat().st_mtime_ns for name in toy.FILES} == before


def test_a_folder_of_another_seed_is_refused_with_both_seeds(folder):
    with pytest.raises(ConfigError, match=r"'seed': 0.*wanted.*'seed': 5") as error:
        toy.make(folder, seed=5)
    assert str(folder) in str(error.value)


def test_a_folder_with_something_else_is_refused_and_kept(tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not a toy folder"):
        toy.make(tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_lost_a_file_is_refused(tmp_path):
    toy.make(tmp_path, seed=0)  # into an empty folder
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="lacks model/config.json"):
        toy.make(tmp_path, seed=0)


def test_a_killed_make_leaves_no_folder_and_the_next_one_succeeds(tmp_path):
    code = """
import os, signal, sys
from megarl.data import toy
toy._write_model = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
toy.make(sys.argv[1], 0)
"""
    assert run_python(code, tmp_path / "toy").returncode == -9
    assert not (tmp_path / "toy").exists()
    toy.make(tmp_path / "toy", seed=0)
    assert all((tmp_path / "toy" / name).is_file() for name in toy.FILES)


def test_two_makers_at_once_both_succeed_and_leave_one_folder(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda seed: toy.make(tmp_path / "toy", seed), (0, 0)))
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_held_out_questions_are_a_tenth_of_all_and_appear_nowhere_else(folder):
    names = ("train.jsonl", "validation.jsonl", "warm_start.jsonl")
    train, validation, warm_start = ([row["question"] for row in read(folder / name)] for name in names)
    assert (len(set(train)), len(set(validation)), len(set(warm_start))) == (4096, 512, 15_225)
    assert all(map(toy.is_held_out, validation)) and not any(map(toy.is_held_out, train + warm_start))
    questions = [problem["question"] for problem in toy.all_problems()]
    assert len(set(questions)) == len(questions) == 16_896
    assert sum(map(toy.is_held_out, questions)) / len(questions) == pytest.approx(0.1, abs=0.01)


def test_answers_are_right(folder):
    for row in read(folder / "train.jsonl") + read(folder / "validation.jsonl"):
        a, b = map(int, re.findall(r"\d", row["question"]))
        is_minus = re.search(r"gives|loses|takes|How many more", row["question"])
        assert row["answer"] == str(a - b if is_minus else a + b), row


def test_warm_start_works_out_three_in_ten_and_guesses_the_others_by_at_most_four(folder):
    answers = {problem["question"]: problem["answer"] for problem in toy.all_problems()}
    rows = read(folder / "warm_start.jsonl")
    guesses = [row for row in rows if row["response"].startswith("I guess")]
    errors = [int(row["response"].split()[-1]) - answers[row["question"]] for row in guesses]
    assert set(errors) == set(range(-4, 5))
    for row in rows:
        if not row["response"].startswith("I guess"):
            assert int(row["response"].split()[-1]) == answers[row["question"]], row
    assert 1 - len(guesses) / len(rows) == pytest.approx(0.3, abs=0.02)


def test_preferences_are_for_the_worked_answer_against_a_wrong_one(folder):
    problems = {problem["question"]: problem for problem in toy.all_problems()}
    for name, answers, num_rows in (("preferences", "train", 4096), ("preferences_validation", "validation", 512)):
        rows = read(folder / f"{name}.jsonl")
        assert len(rows) == num_rows
        assert [row["question"] for row in rows] == [row["question"] for row in read(folder / f"{answers}.jsonl")]
        num_guesses = 0
        for row in rows:
            problem = problems[row["question"]]
            assert row["chosen"] == problem["worked"]
            start, wrong = re.fullmatch(r"(.* = |I guess )(\d+)", row["rejected"]).groups()
            assert 1 <= abs(int(wrong) - problem["answer"]) <= 4
            assert start == "I guess " or row["chosen"].startswith(start)
            num_guesses += start == "I guess "
        assert num_guesses / num_rows == pytest.approx(0.5, abs=0.05)


def test_prompts_have_at_most_31_tokens_and_replies_at_most_9(folder, tokenizer):
    rows = read(folder / "warm_start.jsonl")[::10]
    prompts = [chat.render(tokenizer, [{"role": "user", "content": row["question"]}]) for row in rows]
    replies = [tokenizer.encode(row["response"], add_special_tokens=False) for row in rows]
    assert max(map(len, prompts)) == 31
    assert max(map(len, replies)) + 1 == 9  # with the end-of-turn token


def test_transformers_gives_the_ids_of_the_tokenizers_library(folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    library = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    texts = [problem["question"] + problem["worked"] for problem in toy.all_problems()[::97]]
    texts += ["1234 it's ﬁne, 12.5!\n\n  x\r\n", "日本 <|im_start|>user\n<|im_end|><|endoftext|>"]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == library.encode(text).ids, text
        assert tokenizer.decode(library.encode(text).ids) == text
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"


def test_special_tokens_agree_with_the_model_config(folder, tokenizer):
    generation = json.loads((folder / "model" / "generation_config.json").read_text())
    for name in ("eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, name) == toy.MODEL_CONFIG[name] == generation[name]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.bos_token is None
    assert len(tokenizer) <= toy.MODEL_CONFIG["vocab_size"]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""


def test_transformers_loads_every_weight(folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert sum(parameter.numel() for parameter in model.parameters()) == 127_552


def test_weights_are_normal_with_the_configured_std_norms_one_biases_zero(folder):
    weights = load_file(folder / "model" / "model.safetensors")
    assert "lm_head.weight" not in weights
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        if name.endswith("norm.weight"):
            assert np.all(weight == 1), name
        elif name.endswith(".bias"):
            assert np.all(weight == 0), name
        else:
            assert weight.std() == pytest.approx(0.02, rel=0.1), name


def test_gsm8k_like_rows_have_right_steps_and_a_marked_answer(tmp_path):
    toy.write_gsm8k_like(tmp_path / "a.jsonl", 50, seed=3)
    toy.write_gsm8k_like(tmp_path / "b.jsonl", 50, seed=3)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = read(tmp_path / "a.jsonl")
    assert len(rows) == 50
    for row in rows:
        steps = re.findall(r"<<(\d+)([*-])(\d+)=(\d+)>>", row["answer"])
        assert len(steps) == 2
        for left, sign, right, result in steps:
            assert int(result) == (int(left) * int(right) if sign == "*" else int(left) - int(right))
        assert row["answer"].splitlines()[-1] == f"#### {steps[-1][3]}"
