"""The loop on responses that are there: what its loss is told, and what it does where a validation breaks."""

from types import SimpleNamespace

import pytest
from end_to_end import ROOT, Run

from megarl.config import Config
from megarl.data import toy
from megarl.errors import RunError
from megarl.inputs import SupervisedInputs
from megarl.supervised import SupervisedTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "toy"
    toy.make(folder, seed=0)
    for name in ("warm_start", "preferences"):
        lines = (folder / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:5]))
    return folder


def trainer(folder, rows, actor=None, metrics=None, **algorithm):
    """Of the toy's rows, with an actor that the test gives and a list that takes the metrics."""
    data = {"train": f"{folder}/{rows}.jsonl", "prompt_key": "question"}
    data["validation"] = data["train"]
    settings = {"name": "x", "model": {"path": f"{folder}/model"}, "data": data, "trainer": {"evaluate_prompts": 3}}
    config = Config.model_validate(settings | {"algorithm": {"prompts_per_step": 4} | algorithm})
    run = SimpleNamespace(log_metrics=metrics.append if metrics is not None else None)
    console = SimpleNamespace(line=lambda text: None)
    return SupervisedTrainer(config, SupervisedInputs(config), run, console, actor, None, None)


def test_the_loss_is_told_its_own_keys(folder):
    constant = {"loss_aggregation": "constant", "aggregation_length": 50}
    assert trainer(folder, "warm_start", name="sft", **constant).loss.keywords == constant
    smoothed = trainer(folder, "preferences", name="dpo", preference={"beta": 0.3, "label_smoothing": 0.1})
    assert smoothed.loss.keywords == {"beta": 0.3, "label_smoothing": 0.1}
    assert trainer(folder, "preferences", name="reward_model").loss.keywords == {"center": 0.0}


def test_validation_metrics_are_means_over_tokens_or_pairs(folder):
    metrics = []
    sums = {"loss": 0.5, "nonfinite_logprobs": 0.0, "margin": 6.0, "accuracy": 1.5}
    actor = SimpleNamespace(evaluate=lambda samples, loss, pairs: sums)
    trainer(folder, "preferences", actor, metrics, name="reward_model").evaluate(7)
    named = {"loss": 0.5, "margin": 2.0, "accuracy": 0.5}  # of three pairs
    assert metrics == [{"step": 7} | {f"validation/reward_model/{name}": value for name, value in named.items()}]


@pytest.mark.parametrize("broken, loss", [(3.0, float("nan")), (0.0, float("inf")), (2.0, 0.5)])
def test_a_validation_that_is_not_finite_ends_the_run_with_the_numbers(folder, broken, loss):
    sums = {"loss": loss, "nonfinite_logprobs": broken, "nll": loss}
    actor = SimpleNamespace(evaluate=lambda samples, loss, pairs: sums)
    text = f"validation after step 4: {broken:g} log-probs are not finite, the loss is {loss:g}"
    with pytest.raises(RunError, match=text):
        trainer(folder, "warm_start", actor, [], name="sft").evaluate(4)


@pytest.mark.soak
def test_weights_that_overflow_are_told_in_one_line(tmp_path):
    overrides = ["data.validation=runs/toy/warm_start.jsonl", "trainer.evaluate_prompts=8", "trainer.evaluate_every=1"]
    optimizer = {"learning_rate": "1e30", "warmup_steps": "0"}
    overrides += [f"roles.actor.optimizer.{key}={value}" for key, value in optimizer.items()]
    with Run(tmp_path, str(ROOT / "configs/quickstart_sft.yaml"), "name=test", "trainer.steps=2", *overrides) as run:
        assert run.wait(200) == 1, run.output
    assert "  attention:         SDPA of torch, padded" in run.output
    last = run.output.strip().splitlines()[-1]
    assert last.startswith("megarl: error: validation after step 1: "), run.output
    assert last.endswith(", the loss is nan"), run.output
