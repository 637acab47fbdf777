"""Pairs of a preferred and a rejected response, and sequences as a reward model scores them."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config import DataConfig
from megarl.data.dataset import read_answered
from megarl.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_pairs(
    path: str | Path,
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int | None = None,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
) -> list[Sample]:
    """Two samples per row, the chosen one first: rows with `data_config.prompt_key` and two different responses, see
    `read_answered`."""
    return read_answered(path, data_config, tokenizer, context_length, (chosen_key, rejected_key))


def scored(sample: Sample) -> Sample:
    """The sample with one token more, whose place holds the score of the whole sequence, and none trained but that one.

    An engine's value at t is that of the tokens before t, so the place of the last token cannot hold it. What is added
    is the last token once more; its id is of no consequence, as a causal mask hides it from all tokens before. Without
    the other per-token fields, which speak of the sequence as it was.
    """
    token_ids = torch.cat([sample.token_ids, sample.token_ids[-1:]])
    return Sample(
        prompt=sample.prompt,
        group_id=sample.group_id,
        index=sample.index,
        prompt_length=sample.prompt_length,
        token_ids=token_ids,
        loss_mask=torch.arange(len(token_ids)) == len(token_ids) - 1,
        response_text=sample.response_text,
        status=sample.status,
        policy_version=sample.policy_version,
    )
