"""Run packed micro-batches through Megatron's pipeline schedule: forward, loss, backward, reduced gradients."""

from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megarl.engine.hf.shape import ModelShape
from megarl.engine.logprob import logprobs_and_entropy
from megarl.engine.modules import packed_sequences
from megarl.sample import Batch

# (log-probs [T], entropy [T] or None, batch) -> (loss to differentiate, results of the micro-batch)
Head = Callable[[torch.Tensor, torch.Tensor | None, Batch], tuple[torch.Tensor, dict]]


def run_microbatches(
    model, batches: list[Batch], head: Head, shape: ModelShape, temperature: float, forward_only: bool, entropy: bool = False
) -> list[dict]:
    """The results of `head` for each micro-batch, in order, on the last pipeline stage; [] on the others.

    Unless `forward_only`, gradients are left summed over micro-batches and data-parallel ranks in `main_grad`.
    """

    def forward_step(iterator, model):
        batch = next(iterator)
        packed = packed_sequences(batch, shape, get_model_config(model).params_dtype)
        output = model(batch.token_ids[None], batch.positions[None], None, packed_seq_params=packed)
        return output, lambda logits: _apply_head(logits.squeeze(0), batch)

    def _apply_head(logits_TV: torch.Tensor, batch: Batch):
        logprobs_T, entropy_T = logprobs_and_entropy(logits_TV, batch.targets, shape.vocab_size, temperature, entropy)
        loss, results = head(batch.align(logprobs_T), None if entropy_T is None else batch.align(entropy_T), batch)
        # Three outputs select the schedule's path that divides by nothing; the count is not used.
        return loss, torch.zeros([], dtype=torch.int, device=loss.device), results

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=max(len(batch.token_ids) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )

