"""A reward model's scores against transformers, and its way through a checkpoint and a Hugging Face folder."""

import json
from types import SimpleNamespace

import pytest
import torch
from hf_models import write_hf_model
from ranks import run_ranks
from safetensors.torch import load_file

from megarl.algorithms.preference_losses import bradley_terry_loss
from megarl.config import CriticConfig, ModelConfig, OptimizerConfig
from megarl.data.responses import with_score_token
from megarl.errors import ConfigError
from megarl.rewards.model import begin_on_ranks
from megarl.sample import Prompt, Sample

EOS = 2
SEQUENCES = [[5, 6, 7, 8, 9, EOS], [*range(100, 60, -1), EOS], [1, 100, 4, EOS], [3, EOS]]
SAMPLES = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in SEQUENCES]


def value_engine(model, bias, trainable=True):
    from megarl.engine.engine import Engine

    role = CriticConfig(value_head_std=0.3, value_head_bias=bias, max_tokens_per_gpu=60)
    return Engine(ModelConfig(path=str(model), dtype="float32"), role, "value", trainable)


def score(engine):
    values = engine.values([with_score_token(sample) for sample in SAMPLES])
    return [values[i][-1].item() for i in range(len(SAMPLES))]


def score_frozen(rank, folder):
    """The scores as the reward `model` has them, of an engine that is not trained; nothing from a rank that does not
    report."""
    engine = value_engine(folder, bias=True, trainable=False)
    assert not any(hasattr(parameter, "main_grad") for parameter in engine.parameters())

    def start_values(samples):
        values = engine.values(samples)
        return lambda: [values[i] for i in range(len(values))]

    answers = begin_on_ranks(SimpleNamespace(start_values=start_values), SEQUENCES)()
    assert {who for who, _ in answers} <= {"the reward model"}
    return [value for _, value in answers]


def train_save_export(rank, model, folder, bias):
    """(scores after a step, those of an engine that starts from the exported folder, what the export says, why one
    without a bias cannot)."""
    from megarl.engine import checkpoint, parallel
    from megarl.engine.hf.export import export_hf
    from megarl.rollout.server import free_port

    engine = value_engine(model, bias is not None)
    engine.use_optimizer(OptimizerConfig())
    engine.train_step([with_score_token(sample) for sample in SAMPLES], bradley_terry_loss, 1e-2, pairs=True)
    if bias is not None:
        with torch.no_grad():
            engine.chunks[0].output_layer.bias.fill_(bias)
    checkpoint.save(engine, model, folder / "checkpoint")
    parallel.shutdown()
    said = export_hf(folder / "checkpoint", folder / "out")
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), CriticConfig(), seed=1)
    refused = ""
    try:
        value_engine(folder / "out", bias=False)
    except ConfigError as error:
        refused = str(error)
    return score(engine), score(value_engine(folder / "out", bias is not None)), said, refused


CASES = {  # family, tied, bias of the head, config.json
    "without a bias": ("qwen2", True, None, {"eos_token_id": EOS, "pad_token_id": 0}),
    "with a bias, end of turn pads": ("llama", False, 0.75, {"eos_token_id": [EOS, 7], "pad_token_id": EOS}),
}


@pytest.mark.parametrize("case", CASES)
def test_scores_are_those_of_transformers_and_survive_the_export(tmp_path, case):
    from transformers import AutoModelForSequenceClassification

    family, tied, bias, ids = CASES[case]
    model = write_hf_model(tmp_path / "model", family, tied, vocab_size=101, num_layers=2, **ids)
    ((scores, again, said, refused),) = run_ranks(train_save_export, 1, model, tmp_path, bias)
    assert again == pytest.approx(scores, abs=1e-6) and len(set(scores)) == len(scores)
    assert ("scores there are lower by 0.75" in said) == (bias is not None), said
    assert ("a score.bias of 0.75, and the value head has none" in refused) == (bias is not None), refused

    out = tmp_path / "out"
    tensors = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert "lm_head.weight" not in tensors and tensors["score.weight"].shape == (1, 64)
    assert tensors["score.bias"].item() == (bias or 0.0)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    assert set(report["unexpected_keys"]) == {"score.bias"} and theirs.config.num_labels == 1
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(theirs).__name__]
    expected = [theirs(torch.tensor([ids])).logits.item() + (bias or 0.0) for ids in SEQUENCES]
    assert scores == pytest.approx(expected, abs=1e-5)
    for size in (1, 2):
        assert run_ranks(score_frozen, size, out, tensor_parallel=size)[0] == pytest.approx(expected, abs=1e-5)
