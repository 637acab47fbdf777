"""A real model on real data: two steps of configs/gsm8k_smollm2_135m.yaml on a CPU, then its export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end import ROOT, Run, steps

from megarl.data.toy import write_gsm8k_like


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Overrides that name the model, and GSM8K's own training file where MEGARL_GSM8K names its folder."""
    folder = tmp_path_factory.mktemp("gsm8k")
    subprocess.run([sys.executable, ROOT / "tools/make_smollm2.py", folder / "model"], check=True, timeout=300)
    if os.environ.get("MEGARL_GSM8K"):
        train = Path(os.environ["MEGARL_GSM8K"]).resolve() / "train.jsonl"
    else:
        train = folder / "train.jsonl"
        write_gsm8k_like(train, num_rows=64, seed=0)
    return folder, [f"model.path={folder / 'model'}", f"data.train={train}"]


@pytest.mark.soak
def test_two_steps_and_export(inputs, tmp_path):
    folder, overrides = inputs
    short = ["name=test", "trainer.steps=2", "algorithm.prompts_per_step=2", "algorithm.group_size=2",
             "rollout.sampling.max_new_tokens=24", "rollout.sampling.temperature=0.7", "sync.bucket_mb=64"]  # fmt: skip
    with Run(tmp_path, str(ROOT / "configs/gsm8k_smollm2_135m.yaml"), *overrides, *short) as run:
        assert run.wait(600) == 0, run.output
    found = steps(tmp_path / "runs/test")
    assert [m["step"] for m in found] == [1, 2]
    assert found[0]["rollout/logprob_diff_mean"] < 0.05  # bfloat16
    assert found[0]["kl/ref"] == 0.0
    samples = [json.loads(line) for line in (tmp_path / "runs/test/samples.jsonl").read_text().splitlines()]
    assert all(s["response"] and s["reward"] in (0.0, 1.0) for s in samples)

    command = [sys.executable, ROOT / "tools/convert_ckpt.py", "--to-hf", tmp_path / "runs/test", tmp_path / "out"]
    subprocess.run(command, check=True, timeout=300)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    start = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.tie_word_embeddings and model.dtype == start.dtype
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
        == AutoTokenizer.from_pretrained(folder / "model").chat_template
    )
    for (name, ours), (_, theirs) in zip(model.state_dict().items(), start.state_dict().items(), strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 1e-2, name  # two steps at a rate of 1e-6
