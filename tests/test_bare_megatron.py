"""The plain Megatron-Core loop of the benchmarks trains, in every layout that it is measured in."""

import gc
import math
import sys

import pytest
import torch
from end_to_end import ROOT
from ranks import run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
from shapes import SHAPES

from megarl.engine.hf.shape import ModelShape

LENGTHS = [13, 24, 3]


def train_tiny(rank, steps, warmup):
    """(result, models left in memory)"""
    from bare_megatron import run_bare
    from megatron.core.models.gpt.gpt_model import GPTModel

    shape = SHAPES["tiny"] | {"vocab_size": 256}  # not padded in any layout
    result = run_bare(shape, 2, LENGTHS, "local", "float32", steps, warmup)
    return result, sum(isinstance(held, GPTModel) for held in gc.get_objects())


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_loss_falls_from_that_of_a_uniform_guess(tensor_parallel):
    results = run_ranks(train_tiny, 2, 3, 0, tensor_parallel=tensor_parallel)
    losses = results[0][0]["loss"]
    assert losses[0] == pytest.approx(math.log(256), abs=0.05)
    assert losses[0] > losses[1] > losses[2]
    for result, models in results:
        assert result["loss"] == losses and models == 0
        assert len(result["step_s"]) == 3


def test_tensor_parallel_ranks_train_as_one_rank_and_warmup_is_not_reported():
    (one, _), (two, _), _ = run_ranks(train_tiny, 1, 3, 0) + run_ranks(train_tiny, 2, 1, 2, tensor_parallel=2)
    assert two["loss"] == pytest.approx(one["loss"][2:], rel=1e-6)
    assert len(two["step_s"]) == 1


def refusals(rank):
    from bare_megatron import run_bare

    tiny, messages = SHAPES["tiny"], []
    for shape, lengths, impl in [
        (tiny | {"model_type": "llama"}, [8], "local"),
        (tiny, [8], "te"),
        (tiny, [8, 3], "local"),
    ]:
        with pytest.raises(ValueError) as error:
            run_bare(shape, 1, lengths, impl, "float32", 1, 0)
        messages.append(str(error.value))
    return messages


def test_arguments_that_do_not_fit_are_refused():
    for family, impl, tokens in run_ranks(refusals, 2, tensor_parallel=2):
        assert "'llama'" in family and "'te'" in impl and "11 tokens" in tokens


@pytest.mark.parametrize("name, num_parameters", [("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-7b", 7_615_616_512)])
def test_shapes_have_the_published_number_of_parameters(name, num_parameters):
    from transformers import AutoModelForCausalLM, Qwen2Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(**SHAPES[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape["model_type"] == "qwen2"])
def test_shapes_are_read_as_the_engine_reads_them(name):
    shape = ModelShape.from_hf(SHAPES[name])
    assert shape.family == "qwen2" and shape.rope_theta == 1e6 and shape.num_heads * shape.head_dim == shape.hidden_size
