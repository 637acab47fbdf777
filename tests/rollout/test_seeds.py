"""Seeds of samples: stable, apart from each other, and never those that SGLang's sampling goes wrong with."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.rollout.seeds import LARGEST, group_seeds, sample_seed, tokens_of_largest_hash
from megarl.sample import Prompt

QWEN = {"max_new_tokens": 512, "vocab_size": 151_936}


@pytest.fixture
def sglang_hash(monkeypatch):
    """SGLang's kernel, loaded for Triton's interpreter, which needs no GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location("hash_of_test", package / "kernels/ops/sampling/murmur_hash.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.murmur_hash32


def test_a_seed_is_the_same_in_every_process_and_fits_into_63_bits():
    code = "from megarl.rollout.seeds import sample_seed; print(sample_seed(1, 2, [5, 6, 7], 3, 16, 448))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(result.stdout) == sample_seed(1, 2, [5, 6, 7], 3, 16, 448) == 5862887567877224408, result.stderr
    seeds = [sample_seed(1, 2, [5, 6, 7], index, **QWEN) for index in range(1000)]
    assert 2**62 < max(seeds) < 2**63 and 0 <= min(seeds) < 2**54


def test_seeds_differ_by_seed_step_prompt_and_index():
    arguments = [(1, 2, [5, 6], 3), (2, 2, [5, 6], 3), (1, 3, [5, 6], 3), (1, 2, [5, 6], 4)]
    arguments += [(1, 2, [6, 5], 3), (1, 2, [5], 3)]
    assert len({sample_seed(*each, **QWEN) for each in arguments}) == len(arguments)


def test_a_prompt_that_comes_twice_gets_other_seeds_in_one_round_and_in_the_next():
    prompts = [Prompt([], [5, 6]), Prompt([], [7]), Prompt([], [5, 6])]
    rounds = [group_seeds(1, 2, prompts, 4, first_index=first, **QWEN) for first in (0, 12)]
    assert [[len(group) for group in groups] for groups in rounds] == [[4] * 3] * 2
    assert len({seed for groups in rounds for group in groups for seed in group}) == 2 * 3 * 4
    assert rounds[0][1][2] == sample_seed(1, 2, [7], 6, **QWEN)


def test_the_token_of_the_largest_hash_is_that_of_sglangs_kernel(sglang_hash):
    seeds = [0, 7, 2**31 + 1, 2**63 - 1, *(sample_seed(1, 2, [3], index, **QWEN) for index in range(12))]
    positions = np.arange(16, dtype=np.uint32)
    tokens = [int(tokens_of_largest_hash(seed, positions[i : i + 1])[0]) for i, seed in enumerate(seeds)]
    hashes = sglang_hash(torch.tensor(seeds).to(torch.uint64), torch.arange(16), torch.tensor(tokens))
    assert hashes.to(torch.int64).diag().tolist() == [LARGEST] * 16


def test_seeds_that_would_meet_it_in_their_response_are_passed_over():
    """At 2**21 tokens and 1000 positions 4 in 10 seeds would."""

    def meets(seed):
        return (tokens_of_largest_hash(seed, np.arange(1, 1001, dtype=np.uint32)) < 2**21).any()

    assert not any(meets(sample_seed(1, step, [3, 4], 0, 1000, 2**21)) for step in range(200))
    met = sum(meets(sample_seed(1, step, [3, 4], 0, 1, 1)) for step in range(200))
    assert 40 < met < 120
