"""transformers against Megatron: the same log-probs, or scores, from a Hugging Face folder and from a checkpoint?"""

import json
from pathlib import Path

import torch

from megarl.checkpoint.folder import HF_FOLDER, ROLE_FILE
from megarl.config import CriticConfig, ModelConfig
from megarl.data.responses import with_score_token
from megarl.engine import checkpoint, parallel
from megarl.engine.engine import Engine
from megarl.engine.hf.files import tensors_in
from megarl.engine.hf.import_hf import SCORE_BIAS, read_tensor, widest_dtype
from megarl.engine.hf.shape import ModelShape
from megarl.errors import RunError
from megarl.rollout.server import free_port
from megarl.sample import Prompt, Sample

BOUND = 1e-4  # both compute in float32, with the same weights
LENGTHS = (2, 33, 128)


def compare(role_folder: Path, hf_folder: Path) -> str:
    """A line with the largest difference over a few fixed random sequences. Raises RunError above the bound.

    In float32, with the weights of both rounded to the narrower dtype of the two folders; the line tells what rounding
    changes. One model after the other is held whole. No other role may be in this process.
    """
    about = json.loads((role_folder / ROLE_FILE).read_text())
    config = json.loads((hf_folder / "config.json").read_text())
    sequences = random_sequences(ModelShape.read(role_folder / HF_FOLDER), config.get("pad_token_id"))
    hf_dtype = widest_dtype(tensors_in(hf_folder))
    head = about.get("head", "lm")
    role = CriticConfig(value_head_bias=about.get("value_head_bias", False), lora=about.get("lora"))
    our_exact, ours = megatron_predictions(role_folder, head, role, hf_dtype, sequences)
    their_exact, theirs = transformers_predictions(hf_folder, head, about["dtype"], sequences)
    difference = float((ours - theirs).abs().max())
    what = "scores" if head == "value" else "log-probs"
    text = (
        f"{what} of {len(sequences)} random sequences by transformers and by Megatron, in float32, differ by at most "
    )
    text += f"{difference:.2g}, bound {BOUND:g}"
    if rounding := float(max((ours - our_exact).abs().max(), (theirs - their_exact).abs().max())):
        text += f"; rounding the weights moved them by at most {rounding:.2g}"
    if not difference <= BOUND:  # NaN is not
        raise RunError(f"{hf_folder} is not the model of {role_folder}: {text}")
    return text


def random_sequences(shape: ModelShape, pad_token_id: int | None) -> list[list[int]]:
    """Without padding: transformers gives the score of the token before it."""
    ids = torch.tensor([i for i in range(shape.vocab_size) if i != pad_token_id])
    generator = torch.Generator().manual_seed(0)
    lengths = [min(length, shape.max_positions - 1) for length in LENGTHS]  # a score takes one more place
    return [ids[torch.randint(len(ids), (length,), generator=generator)].tolist() for length in lengths]


def megatron_predictions(
    role_folder: Path, head: str, role: CriticConfig, dtype: str, sequences: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(as stored, with weights rounded to `dtype`): log-probs of all tokens but the first of each sequence, one after
    another, or the score of each."""
    parallel.initialize(0, 1, "127.0.0.1", free_port("127.0.0.1"), role, seed=0)
    try:
        model = ModelConfig(path=str(role_folder / HF_FOLDER), dtype="float32", transformer_impl="local")
        engine = Engine(model, role, head, trainable=False, load_weights=False)
        checkpoint.load(engine, role_folder)
        exact = predictions(engine, sequences)
        with torch.no_grad():
            for parameter in engine.parameters():
                parameter.copy_(rounded(parameter, dtype))
        return exact, predictions(engine, sequences)
    finally:
        parallel.shutdown()


def predictions(engine: Engine, sequences: list[list[int]]) -> torch.Tensor:
    samples = [Sample.from_response(Prompt([], ids[:1]), ids[1:], group_id=0, index=0) for ids in sequences]
    if engine.head == "value":
        values = engine.values([with_score_token(sample) for sample in samples])
        return torch.stack([values[i][-1] for i in range(len(samples))])
    logprobs = engine.logprobs(samples, temperature=1.0)
    return torch.cat([logprobs[i][0][1:] for i in range(len(samples))])


@torch.no_grad()
def transformers_predictions(
    hf_folder: Path, head: str, dtype: str, sequences: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by transformers. Raises RunError where it finds no place for a tensor, or a place without one."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    factory = AutoModelForSequenceClassification if head == "value" else AutoModelForCausalLM
    model, report = factory.from_pretrained(hf_folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: names for key, names in report.items() if names and set(names) != {SCORE_BIAS}}
    if wrong:
        raise RunError(f"transformers does not load {hf_folder} whole: {wrong}")
    bias = read_tensor(tensors_in(hf_folder).get(SCORE_BIAS), SCORE_BIAS).float()  # it has no place for one

    def predict() -> torch.Tensor:
        outputs = [model(torch.tensor([ids])).logits[0] for ids in sequences]
        if head == "value":
            return torch.cat(outputs) + bias
        steps = zip(sequences, (logits[:-1].log_softmax(-1) for logits in outputs))
        return torch.cat([logprobs[torch.arange(len(ids) - 1), ids[1:]] for ids, logprobs in steps])

    model.eval()
    exact = predict()
    for parameter in (*model.parameters(), bias):
        parameter.copy_(rounded(parameter, dtype))
    return exact, predict()


def rounded(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.detach().to(getattr(torch, dtype)).float()
