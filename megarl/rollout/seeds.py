"""SGLang's deterministic inference: a sample is a function of weights, prompt and seed, whatever else the server does.

SGLang 0.5.17 hashes (seed, position, token) to 32 bits and makes Gumbel noise of that. The largest hash becomes
infinite noise: its token is sampled whatever its probability (sgl-project/sglang#25106), at a vocabulary of 152 k once
in 28 k tokens. The hash can be inverted, so seeds that would meet such a token in their response are passed over here.
Requests with top_k, and greedy ones, change the draws of those in the same batch: send none meanwhile.
"""

import hashlib
import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megarl.config import Config
    from megarl.sample import Prompt

ATTENTION_BACKENDS = ("fa3", "fa4", "flashinfer", "triton")  # on NVIDIA's GPUs; flashinfer without cached prefixes
MIN_CHUNK = 4096  # a longer prompt is cut at multiples of it, and waits for ever where chunks are smaller
SERVER_ARGS = {"enable_deterministic_inference": True, "chunked_prefill_size": 2 * MIN_CHUNK}

MAX_CANDIDATES = 2**34  # tokens of the response * tokens of the vocabulary: of e**4 seeds one is taken then

# MurmurHash3_x86_32 of four words: the seed's low and high half, the position, the token.
FIRST, SECOND, FINAL_FIRST, FINAL_SECOND = 0xCC9E2D51, 0x1B873593, 0x85EBCA6B, 0xC2B2AE35
FACTOR, SUMMAND, NUM_BYTES, LARGEST = 5, 0xE6546B64, 16, 0xFFFFFFFF


def sample_seed(seed: int, step: int, prompt_ids: list[int], index: int, max_new_tokens: int, vocab_size: int) -> int:
    """The seed, 0 <= s < 2**63, of a sample of a run with `seed`: the same in every process.

    `index` tells samples of one prompt in one step apart. The response has at most `max_new_tokens` tokens out of
    `vocab_size`.
    """
    assert max_new_tokens * vocab_size <= MAX_CANDIDATES, f"{max_new_tokens} * {vocab_size} > {MAX_CANDIDATES}"
    digest = hashlib.blake2b(struct.pack("<qqq", seed, step, index), digest_size=8)
    digest.update(np.asarray(prompt_ids, np.int64).tobytes())
    # SGLang's position of a sampled token is that of the token before it.
    positions = np.arange(len(prompt_ids) - 1, len(prompt_ids) - 1 + max_new_tokens, dtype=np.uint32)
    while True:
        chosen = int.from_bytes(digest.digest(), "little") >> 1
        if not (tokens_of_largest_hash(chosen, positions) < vocab_size).any():
            return chosen
        digest.update(b"again")


def group_seeds(
    seed: int,
    step: int,
    prompts: list["Prompt"],
    group_size: int,
    max_new_tokens: int,
    vocab_size: int,
    first_index: int = 0,
) -> list[list[int]]:
    """For `RolloutClient.generate`: of sample j of prompt i, [i][j].

    `first_index`: samples that the step had before, so that a prompt which comes again gets other ones.
    """
    return [
        [
            sample_seed(seed, step, prompt.token_ids, first_index + i * group_size + j, max_new_tokens, vocab_size)
            for j in range(group_size)
        ]
        for i, prompt in enumerate(prompts)
    ]


def seeds_for(
    config: "Config",
    step: int,
    prompts: list["Prompt"],
    group_size: int,
    vocab_size: int,
    temperature: float,
    max_new_tokens: int,
    first_index: int = 0,
) -> list[list[int]] | None:
    """`group_seeds` of a run; None where the config wants none, and for greedy responses."""
    if not config.rollout.deterministic or temperature == 0:
        return None
    return group_seeds(config.seed, step, prompts, group_size, max_new_tokens, vocab_size, first_index)


def tokens_of_largest_hash(seed: int, positions: np.ndarray) -> np.ndarray:
    """[N] uint32: the one word at each of N positions (uint32) whose hash with this seed is 2**32 - 1."""
    state = np.zeros(1, np.uint32)
    for word in (np.array([seed & LARGEST], np.uint32), np.array([seed >> 32], np.uint32), positions):
        state = _rotate(state ^ _scramble(word), 13) * np.uint32(FACTOR) + np.uint32(SUMMAND)
    word = state ^ np.uint32(BEFORE_LAST_MIX)
    return _rotate(word * np.uint32(_inverse(SECOND)), 17) * np.uint32(_inverse(FIRST))


def _scramble(word: np.ndarray) -> np.ndarray:
    return _rotate(word * np.uint32(FIRST), 15) * np.uint32(SECOND)


def _rotate(words: np.ndarray | int, bits: int) -> np.ndarray | int:
    """32-bit words to the left."""
    return (words << bits) & LARGEST | (words >> (32 - bits))


def _inverse(factor: int) -> int:
    return pow(factor, -1, 2**32)


def _state_before_last_mix() -> int:
    """What XOR of state and scrambled token leads to the largest hash: all that comes after it undone."""
    state = LARGEST
    state ^= state >> 16
    state = state * _inverse(FINAL_SECOND) & LARGEST
    state ^= state >> 13 ^ state >> 26
    state = state * _inverse(FINAL_FIRST) & LARGEST
    state ^= state >> 16
    state ^= NUM_BYTES
    return _rotate((state - SUMMAND) * _inverse(FACTOR) & LARGEST, 19)


BEFORE_LAST_MIX = _state_before_last_mix()
