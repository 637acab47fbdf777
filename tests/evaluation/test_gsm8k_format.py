"""GSM8K's own files, whose answers end with `#### 72`, give the number that its authors count."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from scoring import scorer

from megarl import cli
from megarl.data import toy
from megarl.evaluation.estimators import metrics_of
from megarl.evaluation.settings import read_options
from megarl.sample import Prompt, Sample

OFFICIAL = Path(os.environ["MEGARL_GSM8K"]).resolve() if os.environ.get("MEGARL_GSM8K") else None
NEEDS_OFFICIAL = pytest.mark.skipif(not OFFICIAL, reason="MEGARL_GSM8K names the folder of GSM8K's files")


@pytest.fixture
def file(request, tmp_path, monkeypatch):
    """test.jsonl, and beside it a model of the toy's tokenizer whose context has room for it."""
    monkeypatch.chdir(tmp_path)
    toy.make("toy", seed=0)
    config = json.loads(Path("toy/model/config.json").read_text()) | {"max_position_embeddings": 4096}
    Path("toy/model/config.json").write_text(json.dumps(config))
    if request.param == "official":
        shutil.copy(OFFICIAL / "test.jsonl", "test.jsonl")
    else:
        toy.write_gsm8k_like("test.jsonl", num_rows=60, seed=0)
    return Path("test.jsonl")


def stated(text: str) -> str | None:
    """What the authors' script takes for the answer: the first number behind a marker, without commas."""
    match = re.search(r"#### (\-?[0-9\.\,]+)", text)
    return match[1].replace(",", "") if match else None


@pytest.mark.parametrize("file", ["written here", pytest.param("official", marks=NEEDS_OFFICIAL)], indirect=True)
def test_the_files_work_as_they_are_and_the_strict_number_is_the_official_one(file):
    from megarl.evaluation.evaluate import Candidate
    from megarl.evaluation.scoring import evaluate_samples

    arguments = ["--model", "toy/model", "--data", str(file), "--reward", "gsm8k"]
    ((model, config),) = read_options(cli.parse(["eval", *arguments]))[0].items()
    prompts = Candidate(model, config).prompts
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [prompt.messages[-1]["content"] for prompt in prompts] == [row["question"] for row in rows]
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in rows]

    responses = [response_to(rows, i) for i in range(len(rows))]
    result = evaluate_samples("x", samples_of(prompts, responses), scorer("gsm8k"), config)
    correct = [stated(response) == stated(row["answer"]) for response, row in zip(responses, rows)]
    assert 0.2 < sum(correct) / len(rows) < 0.8
    assert [response.reward == 1.0 for prompt in result.prompts for response in prompt.responses] == correct
    assert metrics_of(result, [1], num_resamples=100)["pass@1"].value == pytest.approx(sum(correct) / len(rows))


def response_to(rows: list[dict], i: int) -> str:
    """By turns the worked answer, another row's, the right one without a marker, and the right one alone."""
    answer = rows[i]["answer"]
    number = stated(answer)
    return (answer, rows[i - 1]["answer"], answer.replace("####", "So"), f"It is {number}.\n#### {number}")[i % 4]


def samples_of(prompts: list[Prompt], responses: list[str]) -> list[Sample]:
    return [
        Sample.from_response(prompt, [2], group_id=i, index=i, response_text=response)
        for i, (prompt, response) in enumerate(zip(prompts, responses))
    ]
