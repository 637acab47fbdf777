"""Which folders and keys the two roles of the reward `model` allow."""

import json
from pathlib import Path

import pytest
from config_folder import QWEN_0_5B, folder, only, refusal  # noqa: F401

from megarl.config import describe, load

MODEL = "algorithm.reward={gsm8k: 1.0, model: 0.1}"
RANKS, SERVERS = (MODEL, "roles.reward_model.path=reward"), (MODEL, "roles.reward_server.path=reward")
ONE_SCORE = {"id2label": {"0": "score"}}
QWEN = {"architectures": ["Qwen2ForSequenceClassification"]} | ONE_SCORE
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForSequenceClassification"]} | ONE_SCORE


def write_reward_model(**config) -> None:
    Path("reward").mkdir()
    Path("reward/config.json").write_text(json.dumps(QWEN_0_5B | config))
    for name in ("model.safetensors", "tokenizer.json"):
        Path("reward", name).touch()


FOLDERS = [  # config.json, overrides, what the one line says
    ({"architectures": ["Qwen2ForCausalLM"]}, RANKS, "config.json names Qwen2ForCausalLM, but a reward model is a "
     "sequence classifier with one score; algorithm.name: reward_model trains one, tools/convert_ckpt.py --to-hf"),
    ({}, SERVERS, "config.json names no architecture, but a reward model is a sequence classifier"),
    ({"architectures": ["Qwen2ForSequenceClassification"]}, RANKS, "config.json has 2 labels (id2label, num_labels)"),
    (QWEN | {"id2label": {"0": "a", "1": "b", "2": "c"}}, SERVERS, "config.json has 3 labels"),
    (MISTRAL, SERVERS, "config.json names MistralForSequenceClassification, and SGLang does not serve its scores; "
     "valid: LlamaForSequenceClassification, Qwen2ForSequenceClassification, Qwen3ForSequenceClassification, or this"),
    (QWEN, (MODEL, "roles.reward_model.path=nowhere"), "no such folder: nowhere"),
    (QWEN, (*SERVERS, "roles.reward_server.tensor_parallel=4"), "given 4, but the model has 14 attention heads"),
    (QWEN, (*RANKS, "roles.reward_model={tensor_parallel: 7, gpus_per_node: 7}"), "given 7, but the model has 14"),
    (QWEN, (*SERVERS, "roles.reward_server.server_args={is_embedding: true}"), "is_embedding: not allowed here"),
    (QWEN, (*RANKS, "roles.reward_model.optimizer.learning_rate=1e-3"), "unknown key; did you mean"),
    (QWEN, (*RANKS, "roles.reward_model.recompute=full"), "unknown key; did you mean"),
]  # fmt: skip


@pytest.mark.parametrize("config, overrides, text", FOLDERS)
def test_what_is_no_reward_model_or_what_nobody_reads_is_refused(folder, config, overrides, text):
    write_reward_model(**config)
    assert text in only(refusal(*overrides))


def test_what_fits_is_accepted_and_described(folder):
    write_reward_model(**QWEN)
    text = describe(load("base.yaml", [*RANKS, "roles.reward_model.gpus_per_node=256"]))
    assert "# reward model        reward\n" in text and "# reward_model   1 x 256 ranks        0    128\n" in text
    text = describe(load("base.yaml", [*SERVERS, "placement=colocated", "roles.reward_server.servers=2"]))
    assert "# reward model        reward, by SGLang\n" in text
    assert "# reward_server  2 x 1 ranks          0      2\n" in text


def test_the_engine_takes_a_family_that_sglang_does_not_serve(folder):
    write_reward_model(**MISTRAL)
    load("base.yaml", RANKS)


def test_a_reward_model_of_other_tokens_may_have_a_shorter_context(folder):
    write_reward_model(**QWEN | {"vocab_size": 1000, "max_position_embeddings": 64})
    load("base.yaml", RANKS)
    load("base.yaml", SERVERS)
