"""The central types: Prompt, Sample, Batch, and the one rule that aligns them.

Every per-token field of a Sample has the full length L and is aligned with `token_ids`: index t speaks of token t.
So `old_logprobs[t]` is log p(token t | tokens before t), and index 0 of the first token is always 0. The shift by
one between a model's outputs and its targets happens in `Batch.targets` and nowhere else.
"""

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


class Status(enum.Enum):
    COMPLETED = "completed"  # the model ended its turn
    TRUNCATED = "truncated"  # max_new_tokens or the context ran out
    ABORTED = "aborted"  # generation was interrupted


@dataclass
class Prompt:
    """One row of a data set: all that generation and a reward need."""

    messages: list[dict[str, Any]]  # chat turns, the last one the user's or a tool's
    token_ids: list[int]  # the templated prompt, generation prompt included
    answer: str | None = None  # the reference answer, for a rule reward
    metadata: dict = field(default_factory=dict)  # the row's other columns, and as `source` its place (file:line)
    tools: list[dict] | None = None  # JSON schemas that the chat template was given
    source_index: int = 0  # place of its source among those of data.train, or of data.validation


@dataclass
class Sample:
    """One token sequence on CPU: a prompt and a response, exactly as sampled."""

    prompt: Prompt
    group_id: int  # samples of one prompt in one step share it
    index: int  # place of the sample in its step
    prompt_length: int
    token_ids: torch.Tensor  # [L] int64, prompt + response
    loss_mask: torch.Tensor  # [L] bool, True where the policy is trained; from lengths, never from token values
    response_text: str = ""
    status: Status = Status.COMPLETED
    policy_version: tuple[int, int] = (0, 0)  # of the first and the last response token
    reward: float | None = None  # None until scored
    reward_parts: dict[str, float] = field(default_factory=dict)
    rollout_logprobs: torch.Tensor | None = None  # [L] float32, by the server; 0 where masked
    old_logprobs: torch.Tensor | None = None  # [L] float32, of the policy that sampled, by the actor or the server
    ref_logprobs: torch.Tensor | None = None  # [L] float32, by the reference
    teacher_logprobs: torch.Tensor | None = None  # [L] float32, by the teacher's server; 0 where masked
    values: torch.Tensor | None = None  # [L] float32, by the critic: of the prefix before token t; 0 where masked
    advantages: torch.Tensor | None = None  # [L] float32; 0 where masked
    returns: torch.Tensor | None = None  # [L] float32, what the critic is trained towards; 0 where masked
    weights: torch.Tensor | None = None  # [L] float32, of the off-policy correction; 0 where masked

    def __getstate__(self) -> dict:
        """Tensors travel between processes as numpy arrays: pickling those takes a tenth of the time."""
        return {name: v.numpy() if isinstance(v, torch.Tensor) else v for name, v in vars(self).items()}

    def __setstate__(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, torch.tensor(value) if isinstance(value, np.ndarray) else value)

    def require(self, name: str) -> Any:
        """A field that something before must have filled."""
        value = getattr(self, name)
        assert value is not None, f"sample {self.index} of group {self.group_id} has no {name}"
        return value

    def trained(self, name: str) -> torch.Tensor:
        """What a per-token field that must be filled says of the trained tokens, in order."""
        return self.require(name)[self.loss_mask]

    @property
    def response_length(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @classmethod
    def from_response(cls, prompt: Prompt, response_ids: list[int], **fields: Any) -> "Sample":
        """A sample whose loss mask covers the whole response: the end-of-turn token included, no padding."""
        token_ids = torch.tensor(prompt.token_ids + response_ids, dtype=torch.int64)
        loss_mask = torch.zeros(len(token_ids), dtype=torch.bool)
        loss_mask[len(prompt.token_ids) :] = True
        length = len(prompt.token_ids)
        return cls(prompt=prompt, prompt_length=length, token_ids=token_ids, loss_mask=loss_mask, **fields)


@dataclass
class Batch:
    """What a rank computes on: the samples of one micro-batch packed to T tokens.

    The denominators are those of the whole optimizer step over all micro-batches and ranks, so a loss is a sum of
    per-token terms divided once; gradients are then summed, never averaged.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, from 0 in each sequence
    cu_seqlens: torch.Tensor  # [B+1] int32, sequence boundaries
    max_seqlen: int
    loss_mask: torch.Tensor  # [T] bool
    sequence_ids: torch.Tensor  # [T] int64, which of the B sequences each token belongs to
    num_loss_tokens: int  # of the whole optimizer step
    num_sequences: int  # of the whole optimizer step: those with at least one trained token
    old_logprobs: torch.Tensor | None = None  # [T] float32
    ref_logprobs: torch.Tensor | None = None  # [T] float32
    advantages: torch.Tensor | None = None  # [T] float32
    values: torch.Tensor | None = None  # [T] float32, by the critic before the update
    returns: torch.Tensor | None = None  # [T] float32
    weights: torch.Tensor | None = None  # [T] float32, on the policy's token losses

    @property
    def targets(self) -> torch.Tensor:
        """[T]: the token that each position's output predicts, i.e. the next one; a sequence's last entry predicts
        across its boundary and is dropped by `align`."""
        return torch.roll(self.token_ids, -1)

    def align(self, next_token_values: torch.Tensor) -> torch.Tensor:
        """[T] values at predicting positions -> [T] values at predicted tokens; 0 at each sequence's first token."""
        return torch.roll(next_token_values, 1).masked_fill(self.positions == 0, 0.0)
