"""`megarl eval`: what it refuses, which models it finds, and that its numbers are those of its rows."""

import csv
import itertools
import json
import re
import shutil
import signal
from fractions import Fraction
from pathlib import Path

import pytest
from end_to_end import Run, run_tool, wait_until
from hf_models import write_hf_model
from scoring import samples_with, scorer

from megarl import cli
from megarl.checkpoint.folder import publish
from megarl.config import Config
from megarl.config_rewards import RewardConfig
from megarl.errors import ConfigError, RunError
from megarl.evaluation import models
from megarl.evaluation.estimators import metrics_of
from megarl.evaluation.scoring import evaluate_samples, find_answer_of
from megarl.evaluation.settings import read_options

CONFIG = """device: cpu
name: small
model: {path: toy/model, dtype: float32}
data: {train: gone.jsonl, validation: toy/validation.jsonl, prompt_key: question, max_prompt_tokens: 64}
algorithm: {reward: last_integer}
rollout: {sampling: {max_new_tokens: 8}}
"""
REWARD = """
def vowels(sample):
    if len(sample.response_text) % 7 == 3:
        raise ValueError("no length that is liked")
    return float(num_vowels(sample.response_text) % 2)


def num_vowels(text):
    return sum(text.count(letter) for letter in "aeiou")


def answer_of(response):
    return None if response[:1] in ("", " ") else str(num_vowels(response) // 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, toy_folder):
    """The working directory: base.yaml, the toy, and the module letters with a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").symlink_to(toy_folder)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "letters.py").write_text(REWARD)
    return tmp_path


def refusal(capsys, *arguments: str) -> list[str]:
    assert cli.main(["eval", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.removeprefix("megarl: error: ").splitlines()


def configs_of(*arguments: str):
    return read_options(cli.parse(["eval", *arguments]))


def write_checkpoint(step: int, head: str = "lm", run: str = "runs/small") -> Path:
    """With the files that are looked at before an export."""
    partial = Path(run, "checkpoints", f"step_{step:06d}.partial")
    shutil.copytree("toy/model", partial / "actor/hf", ignore=shutil.ignore_patterns("*.safetensors"))
    (partial / "actor/megarl.json").write_text(json.dumps({"dtype": "bfloat16", "head": head}))
    return publish(partial, {})


# What is refused


def test_all_that_is_wrong_is_said_at_once(folder, capsys):
    arguments = ["--model", "nowhere", "--model", "toy/model", "--model", "model=toy/model", "--data", "no.jsonl"]
    arguments += ["--reward", "foo", "--samples-per-prompt", "4", "--pass-at", "1,8", "--max-new-tokens", "8"]
    arguments += ["--out", "toy", "--max-prompts", "0", "evaluation.major=true"]
    head, *lines = refusal(capsys, *arguments)
    assert head == "9 problems:"
    assert lines[:5] == [
        "--model nowhere: no such folder: nowhere",
        "--model model=toy/model: a model before it is named model too; NAME=PATH gives it a name",
        "override evaluation.major=true: unknown key; did you mean evaluation.majority?",
        "--out toy: toy exists already; an evaluation never overwrites",
        "--max-prompts 0: wanted 1 or more",
    ]
    for beginning in (
        "--data no.jsonl: data.validation: no such file: no.jsonl",
        "--reward foo: algorithm.reward.foo: given 'foo', valid: ",
        "--pass-at 1,8: evaluation.pass_at: given [1, 8], but evaluation.samples_per_prompt is 4, and pass@k needs k",
        "--samples-per-prompt 4: evaluation.samples_per_prompt: given 4, but evaluation.temperature is 0, and greedy",
    ):
        assert sum(line.startswith(beginning) for line in lines[5:]) == 1, beginning
    assert sorted(path.name for path in folder.iterdir()) == ["base.yaml", "letters.py", "toy"]


@pytest.mark.parametrize(
    "arguments, error",
    [
        ([], "--model is missing: it is needed where no config is given"),
        (["--pass-at", "2,2"], "given [2, 2], allowed: whole numbers >= 1, each of them once"),
        (["--pass-at", "0"], "given [0], allowed: whole numbers >= 1, each of them once"),
        (["base.yaml", "--temperature", "-1"], "--temperature -1.0: evaluation.temperature: given -1.0"),
        (["base.yaml", "seed=1", "--seed", "2"], "seed is overridden twice"),
        (["base.yaml", "data.validation=null"], "override data.validation=null: null, and no --data FILE is given"),
        (["base.yaml", "algorithm={name: sft, reward: null}"], "null with algorithm.name: sft, and no --reward NAME"),
        (["base.yaml"], "the run of this config is runs/small: no such folder: runs/small; --model PATH names another"),
        (["base.yaml", "--model", "toy"], "--model toy: toy is neither a checkpoint nor a run directory"),
        (["base.yaml", "--model", "toy/model", "--max-new-tokens", "250"], "= 64 + 250 = 314 is more than the model's"),
    ],
)
def test_options_that_make_no_sense_are_refused(folder, capsys, arguments, error):
    assert error in "\n".join(refusal(capsys, *arguments))


def test_rows_that_no_reward_could_read_are_refused_before_a_server_starts(folder, capsys):
    Path("rows.jsonl").write_text('{"question": "How many?", "answer": ""}\n{"text": 3}\n')
    arguments = ["--model", "toy/model", "--data", "rows.jsonl", "--reward", "gsm8k", "--max-new-tokens", "8"]
    assert cli.main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert "rows.jsonl:1: answer: wanted a non-empty string" in err and "rows.jsonl:2: no column question" in err
    assert not Path("runs").exists()


# Which model


def test_a_run_is_evaluated_at_its_best_checkpoint_or_else_its_newest_complete_one(folder):
    write_checkpoint(2)
    newest = write_checkpoint(10)
    broken = write_checkpoint(12)
    (broken / "actor/megarl.json").unlink()
    ((model, config),) = configs_of("base.yaml")[0].items()
    assert model.role_folder == newest / "actor" and config.model.path == str(newest / "actor/hf")
    assert model.name == "small-step_000010"
    (newest.parent / "best").symlink_to("step_000002")
    assert models.parse("runs/small").name == "small-step_000002"
    assert models.parse("x=runs/small/checkpoints/step_000010").role_folder == newest / "actor"
    with pytest.raises(ConfigError, match="step_000012 has no actor|step_000012 is neither"):
        models.parse(str(broken))


def test_a_checkpoint_that_is_cut_or_writes_no_responses_is_refused(folder):
    checkpoint = write_checkpoint(1)
    (checkpoint / "actor/hf/tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="step_000001 is not a complete checkpoint: actor/hf/tokenizer.json has 1 b"):
        models.parse(str(checkpoint))
    with pytest.raises(ConfigError, match="actor has a value head: it scores, and writes no responses"):
        models.parse(str(write_checkpoint(2, head="value")))


def test_without_a_config_columns_dtype_and_lengths_are_the_models_and_the_files_own(folder):
    checkpoint = write_checkpoint(1)
    arguments = ["--model", "toy/model", "--model", f"rl={checkpoint}", "--data", "toy/validation.jsonl"]
    configs, out = configs_of(*arguments, "--reward", "last_integer", "--max-new-tokens", "16", "seed=3")
    base, rl = configs.values()
    assert (base.data.prompt_key, base.data.answer_key, base.seed) == ("question", "answer", 3)
    assert (base.model.dtype, rl.model.dtype) == ("float32", "bfloat16")
    assert base.data.max_prompt_tokens == 256 - 16 and base.rollout.sampling.max_new_tokens == 16
    assert out.parent == Path("runs/eval") and re.fullmatch(r"eval-\d{8}-\d{6}", out.name)


def test_of_a_supervised_config_only_what_generates_is_taken(folder):
    more = ["algorithm={name: sft}", "roles.actor.gpus_per_node=7", "trainer.steps=3"]
    arguments = ["base.yaml", *more, "--model", "toy/model", "--reward", "last_integer", "--max-new-tokens", "9"]
    (config,) = configs_of(*arguments)[0].values()
    assert list(config.algorithm.reward) == ["last_integer"] and config.rollout.sampling.max_new_tokens == 9
    assert list(config.servers) == ["rollout"] and config.roles.actor.gpus_per_node == 1


def test_models_get_prompts_by_their_own_template_and_only_those_that_fit_all(folder):
    from megarl.evaluation.evaluate import Candidate, share_prompts

    shutil.copytree("toy/model", "other")
    settings = json.loads(Path("other/tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ '<|im_start|>think\n' }}" + settings["chat_template"]
    Path("other/tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"question": text, "answer": "1"} for text in ("How many?", "many " * 230, "How many books?")]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", "toy/model", "--model", "other", "--data", "rows.jsonl", "--reward", "gsm8k"]
    configs, _ = configs_of(*arguments, "--max-new-tokens", "16")
    candidates = [Candidate(model, config) for model, config in configs.items()]
    assert [len(candidate.prompts) for candidate in candidates] == [3, 2]
    notes = share_prompts(candidates, None)
    assert notes == ["1 of 3 prompts are left out, for all models: too long for other"]
    for candidate in candidates:
        assert [prompt.metadata["source"] for prompt in candidate.prompts] == ["rows.jsonl:1", "rows.jsonl:3"]
    first, second = (candidate.prompts[0].token_ids for candidate in candidates)
    assert len(second) > len(first) and second[-len(first) :] == first


# What is counted


def by_hand(rows: list[dict], ks: tuple[int, ...]) -> dict[str, Fraction]:
    """The metrics as a reader of the rows would count them: over all choices of k responses, where so many have a
    reward, and then over prompts."""
    columns: dict[str, list[Fraction]] = {}
    for row in rows:
        scored = [response for response in row["responses"] if response["reward"] is not None]
        if scored:
            columns.setdefault("reward_mean", []).append(mean([int(response["reward"]) for response in scored]))
        for k in ks:
            choices = list(itertools.combinations(scored, k))
            if choices:
                found = [any(response["reward"] >= 1 for response in chosen) for chosen in choices]
                columns.setdefault(f"pass@{k}", []).append(mean(found))
            if choices and k > 1:
                columns.setdefault(f"maj@{k}", []).append(mean([majority(chosen) for chosen in choices]))
        columns.setdefault("length_mean", []).append(mean([response["num_tokens"] for response in row["responses"]]))
        columns.setdefault("truncated_ratio", []).append(mean([response["truncated"] for response in row["responses"]]))
    return {name: mean(values) for name, values in columns.items()}


def mean(values: list) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def majority(chosen: tuple[dict, ...]) -> Fraction:
    """The chance that the answer which most of them give is correct, equal counts decided by lot. Responses of one
    answer may be correct or not here: the shares are those of all responses to the prompt."""
    votes = [response["answer"] for response in chosen if response["answer"] is not None]
    most = max(map(votes.count, votes), default=0)
    leaders = [answer for answer in dict.fromkeys(votes) if votes.count(answer) == most]
    return mean([chosen[0]["share_correct"][answer] for answer in leaders]) if leaders else Fraction(0)


def test_the_report_has_the_numbers_that_its_rows_come_to(folder, capsys):
    arguments = ["--model", "base=toy/model", "--data", "toy/validation.jsonl", "--reward", "letters:vowels"]
    arguments += ["--samples-per-prompt", "4", "--temperature", "1.0", "--pass-at", "1,2,4", "--max-new-tokens", "12"]
    assert cli.main(["eval", *arguments, "--max-prompts", "12", "--out", "out/first", "device=cpu"]) == 1
    output, out = capsys.readouterr(), folder / "out/first"
    assert {path.name for path in out.iterdir()} == {"base.jsonl", "report.csv", "report.html", "report.txt"}
    assert [path.name for path in out.parent.iterdir()] == ["first"]
    assert (out / "report.txt").read_text() in output.out
    rows = [json.loads(line) for line in (out / "base.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in Path("toy/validation.jsonl").read_text().splitlines()[:12]]
    assert [row["source"] for row in rows] == [f"toy/validation.jsonl:{line}" for line in range(1, 13)]
    assert [row["answer"] for row in rows] == [row["answer"] for row in held_out]
    assert [row["messages"] for row in rows] == [[{"role": "user", "content": row["question"]}] for row in held_out]

    responses = [response for row in rows for response in row["responses"]]
    assert len(responses) == 48 and len({response["text"] for response in responses}) > 40
    for response in responses:
        fails, vowels = len(response["text"]) % 7 == 3, len(re.findall("[aeiou]", response["text"]))
        assert (response["reward"], response["error"] is not None) == (None if fails else vowels % 2, fails)
        assert response["reward_parts"] == ({} if fails else {"vowels": vowels % 2})
        assert response["answer"] == (None if response["text"][:1] in ("", " ") else str(vowels // 2))
        assert response["num_tokens"] == 12 or (not response["truncated"] and response["num_tokens"] < 12)
    num_failed = sum(response["reward"] is None for response in responses)
    assert num_failed > 0 and f"base: {num_failed} rewards failed, the first: " in output.err

    with open(out / "report.csv", newline="") as file:
        found = {line["metric"]: line for line in csv.DictReader(file)}
    for row in rows:
        scored = [response for response in row["responses"] if response["reward"] is not None]
        answers = {response["answer"] for response in scored}
        shares = {answer: mean([r["reward"] >= 1 for r in scored if r["answer"] == answer]) for answer in answers}
        for response in scored:
            response["share_correct"] = shares
    expected = by_hand(rows, (1, 2, 4)) | {"errors": num_failed}
    assert found.keys() == expected.keys() | {"reward/vowels"}
    for name, value in expected.items():
        assert float(found[name]["value"]) == pytest.approx(float(value), abs=1e-12), name
    assert 0 < expected["reward_mean"] < expected["pass@2"] < 1


def evaluated(rewards: dict, responses: list[str], **settings):
    """The result of responses to one prompt."""
    samples = samples_with(["7"] * len(responses), group_size=len(responses))
    for sample, response in zip(samples, responses):
        sample.response_text = response
    config = Config(
        name="x",
        model={"path": "x"},
        data={"train": "x"},
        algorithm={"reward": rewards},
        evaluation={"samples_per_prompt": len(responses), "temperature": 1.0} | settings,
    )
    allowing = scorer(rewards, on_error="drop_sample", max_error_ratio=0.9)
    return evaluate_samples("x", samples, allowing, config)


def test_a_failed_reward_is_an_error_and_no_zero(folder):
    rewards = {"vowels": {"function": "letters:vowels"}}
    result = evaluated(rewards, ["a", "b", "abc", "u"], pass_at=[1, 2])
    (prompt,) = result.prompts
    assert [response.reward for response in prompt.responses] == [1.0, 0.0, None, 1.0]
    assert "no length that is liked" in prompt.responses[2].error
    metrics = metrics_of(result, [1, 2])
    assert metrics["reward_mean"].value == pytest.approx(2 / 3) and metrics["errors"].value == 1


def test_final_answers_are_looked_for_as_the_reward_reads_them(folder):
    responses = ["#### 7", "it is 7.0", "none", "#### 1e1"]
    strict = evaluated({"gsm8k": {}}, responses, pass_at=[1, 4])
    assert [response.answer for response in strict.prompts[0].responses] == ["7", None, None, "10"]
    for settings in ({"pass_at": [1]}, {"pass_at": [1, 4], "majority": False}):
        assert not evaluated({"gsm8k": {}}, responses, **settings).has_answers
    flexible = {"completed": RewardConfig(), "gsm8k": RewardConfig(options={"mode": "flexible"})}
    assert [find_answer_of(flexible)(response) for response in responses] == ["7", "7", None, "10"]
    assert find_answer_of({"completed": RewardConfig(), "length": RewardConfig(options={"high": 9})}) is None


def test_an_answer_of_that_fails_or_gives_no_text_is_refused(folder):
    body = "def score(sample):\n    return 1.0\n\n\ndef answer_of(response):\n    "
    Path("wrong_answers.py").write_text(body + "return 7")
    Path("late_answers.py").write_text(body + "return None if not response else response[9]")
    with pytest.raises(ConfigError, match=r"algorithm.reward.x: wrong_answers.answer_of gives 7 for ''"):
        find_answer_of({"x": RewardConfig(function="wrong_answers:score")})
    answer_of = find_answer_of({"x": RewardConfig(function="late_answers:score")})
    with pytest.raises(RunError, match=r"late_answers.answer_of fails on 'short': IndexError"):
        answer_of("short")


@pytest.mark.parametrize(
    "reward, response, answer",
    [
        ("gsm8k", "#### $1,234.50", "1234.5"),
        ("gsm8k", "#### -0", "0"),
        ("gsm8k", "#### 1e99999999", "1E+99999999"),
        ("gsm8k", "7", None),
        ("last_integer", "from 12 to 007", "7"),
        ("last_integer", "it is 3.50", "3.50"),
        ("last_integer", "none", None),
        ("math", r"\boxed{x + 1}", "x+1"),
        ("math", r"\boxed{1} and \boxed{ 0.50 }", "0.5"),
        ("math", "7", None),
    ],
)
def test_equal_answers_are_the_same_text(reward, response, answer):
    assert find_answer_of({reward: RewardConfig()})(response) == answer


# From the command line to the end


@pytest.fixture(scope="module")
def trained(tmp_path_factory, toy_folder):
    """A working directory with a model of random weights, base, and a run of a few supervised steps on it, sft."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "toy").symlink_to(toy_folder)
    write_hf_model(folder / "base", "qwen2", tied=True, vocab_size=448, max_position_embeddings=256)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(toy_folder / "model" / name, folder / "base")
    data = "{train: toy/warm_start.jsonl, prompt_key: question, max_prompt_tokens: 64}"
    roles = "{actor: {optimizer: {learning_rate: 6e-3}}}"
    model = "{path: base, dtype: float32}"
    text = f"device: cpu\nmodel: {model}\ndata: {data}\nalgorithm: {{name: sft}}\nroles: {roles}\n"
    (folder / "sft.yaml").write_text(text)
    with Run(folder, "sft.yaml", "trainer.steps=80", "algorithm.prompts_per_step=64") as run:
        assert run.wait(300) == 0, run.output
    return folder


ON_HELD_OUT = ("sft.yaml", "--data", "toy/validation.jsonl", "--reward", "last_integer", "--max-new-tokens", "12")


@pytest.mark.soak
def test_two_models_are_compared_on_the_same_prompts(trained):
    """The run is exported and served: what it says is what transformers says with its export."""
    arguments = ["--model", "base", "--model", "sft=runs/sft", "--max-prompts", "32", "--out", "out"]
    with Run(trained, *ON_HELD_OUT, *arguments, command="eval") as run:
        assert run.wait(400) == 0, run.output
    assert {path.name for path in (trained / "out").iterdir()} == {
        *("base.jsonl", "sft.jsonl", "report.csv", "report.html", "report.txt")
    }
    base, sft = ([json.loads(line) for line in open(trained / f"out/{name}.jsonl")] for name in ("base", "sft"))
    assert [row["messages"] for row in base] == [row["messages"] for row in sft]
    rewards = [(row["responses"][0]["reward"], other["responses"][0]["reward"]) for row, other in zip(base, sft)]
    wins, losses = sum(b > a for a, b in rewards), sum(b < a for a, b in rewards)
    assert wins > 0 and f"({wins} wins, {32 - wins - losses} ties, {losses} losses)" in run.output

    run_tool("convert_ckpt.py", "--to-hf", "runs/sft", "exported", folder=trained)
    for rows, path in ((base, "base"), (sft, "exported")):
        texts = [row["responses"][0]["text"] for row in rows]
        assert len(set(texts)) > 1 and texts == greedy(trained / path, rows)


def greedy(path: Path, rows: list[dict]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    texts = []
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_tensors="pt")
        prompt = prompt["input_ids"]
        settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": tokenizer.eos_token_id}
        response = model.generate(prompt, **settings)[0, prompt.shape[1] :]
        texts.append(tokenizer.decode(response, skip_special_tokens=True))
    return texts


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["export-*", "logs/sft/server-0.log"])
def test_an_interrupt_leaves_nothing(trained, moment):
    out = trained / f"interrupted-{moment[:4]}"
    with Run(trained, *ON_HELD_OUT, "--model", "sft=runs/sft", "--out", out.name, command="eval") as run:
        assert wait_until(lambda: run.process.poll() or any(trained.glob(f"{out.name}.partial/{moment}")), 120)
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, run.output
    assert not any(trained.glob(f"{out.name}*"))
