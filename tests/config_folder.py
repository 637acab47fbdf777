"""The folder and the few lines that the tests of the config start from."""

import json
from pathlib import Path

import pytest

from megarl.config import load
from megarl.errors import ConfigError

QWEN_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
MOE = QWEN_0_5B | {
    "model_type": "qwen3_moe",
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a run: a model folder, a data file, and base.yaml that names them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN_0_5B))
    (tmp_path / "model" / "model.safetensors").touch()
    (tmp_path / "model" / "tokenizer.json").touch()
    (tmp_path / "train.jsonl").touch()
    write("")
    return tmp_path


def write(text: str, name: str = "base.yaml") -> None:
    """The three lines that every config needs, then `text` from line 4 on."""
    Path(name).write_text("device: cpu\nmodel: {path: model}\ndata: {train: train.jsonl}\n" + text)


def refusal(*overrides: str, file: str = "base.yaml") -> list[str]:
    """The lines of the ConfigError that load raises, without the header of several."""
    with pytest.raises(ConfigError) as error:
        load(file, list(overrides))
    lines = str(error.value).splitlines()
    if len(lines) > 1:
        assert lines[0] == f"{len(lines) - 1} problems in the configuration:"
    return lines[1:] or lines


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]
