"""What a run reads before it starts: several sources, their weights, held-out rows of each, and room for a score."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.config import Config
from megarl.data import toy
from megarl.errors import ConfigError
from megarl.inputs import Inputs, SupervisedInputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    return folder


def config(folder, data, **algorithm):
    settings = {"name": "x", "model": {"path": f"{folder}/model"}, "data": data, "trainer": {"evaluate_prompts": 3}}
    return Config.model_validate(settings | {"algorithm": {"prompts_per_step": 4} | algorithm})


def test_sources_are_mixed_by_weight_and_held_out_rows_come_from_each(folder, tmp_path):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    parquet.write_table(pa.Table.from_pylist(rows[6:]), tmp_path / "b.parquet")
    paths = [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.parquet"]
    weighted = [{"path": path, "weight": weight} for path, weight in zip(paths, (3.0, 1.0))]
    inputs = Inputs(config(folder, {"train": weighted, "validation": paths}))
    assert inputs.stream.weights == [3.0, 1.0]
    taken = inputs.stream.next(8)
    assert sorted(prompt.source_index for prompt in taken) == [0] * 6 + [1] * 2
    assert [prompt.answer for prompt in inputs.validation] == ["0", "6", "1"]
    equal = [source | {"weight": 1.0} for source in weighted]
    with pytest.raises(ConfigError, match=r"2 prompts after filtering < 3, the share by weight 1 of .*=6 .*b.parquet"):
        Inputs(config(folder, {"train": equal}, prompts_per_step=6))


def test_a_given_template_is_the_runs(folder, tmp_path):
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }}")
    data = {"train": f"{folder}/train.jsonl", "prompt_key": "question", "chat_template": f"{tmp_path}/plain.jinja"}
    inputs = Inputs(config(folder, data))
    assert inputs.tokenizer.decode(inputs.prompts[0].token_ids) == inputs.prompts[0].messages[0]["content"]


def test_a_sequence_that_is_scored_has_room_for_the_place_of_its_score(folder, tmp_path):
    row = {"prompt": "1" * 92, "response": "2" * 155, "chosen": "2" * 155, "rejected": "3"}  # 100 + 155 + end of turn
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    data = {"train": f"{tmp_path}/a.jsonl"}
    [[sample]] = SupervisedInputs(config(folder, data, name="sft", prompts_per_step=1)).rows
    assert len(sample.token_ids) == 256
    assert len(SupervisedInputs(config(folder, data, name="dpo", prompts_per_step=1)).rows) == 1
    with pytest.raises(ConfigError, match="a.jsonl:1: chosen: 256 tokens with the prompt > 255, the room in"):
        SupervisedInputs(config(folder, data, name="reward_model", prompts_per_step=1))
