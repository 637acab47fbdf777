"""Run packed micro-batches through Megatron's pipeline schedule: forward, loss, backward, reduced gradients."""

from collections.abc import Callable

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megarl.engine import context
from megarl.engine.modules import packed_sequences
from megarl.sample import Batch

# (what the model's last layer gives for this rank's tokens [T / cp, ...], the token that each of them predicts [T / cp])
#   -> (log-probs or values, entropy or None), each [T / cp]
Predict = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
# (log-probs or values [T], entropy [T] or None, batch) -> (loss to differentiate, results of the micro-batch)
Head = Callable[[torch.Tensor, torch.Tensor | None, Batch], tuple[torch.Tensor, dict]]


def run_microbatches(
    chunks: list[torch.nn.Module],
    batches: list[Batch],
    predict: Predict,
    head: Head,
    inverse_frequencies: torch.Tensor,
    forward_only: bool,
) -> list[dict]:
    """The results of `head` for each micro-batch, in order, on the last pipeline stage; [] on the others.

    Unless `forward_only`, gradients are left summed over micro-batches, context- and data-parallel ranks in `main_grad`.
    """

    def forward_step(iterator, chunk):
        batch = next(iterator)
        split = context.split(batch)
        positions_T = split.mine(batch.positions)
        packed = packed_sequences(batch, positions_T, inverse_frequencies, get_model_config(chunk).params_dtype)
        output = chunk(split.mine(batch.token_ids)[None], positions_T[None], None, packed_seq_params=packed)
        return output, lambda output: _apply_head(output.squeeze(0), batch, split)

    def _apply_head(output: torch.Tensor, batch: Batch, split: context.Split):
        predictions, entropy = predict(output, split.mine(batch.targets))
        aligned = [None if x is None else batch.align(split.whole(x)) for x in (predictions, entropy)]
        loss, results = head(*aligned, batch)
        # Three outputs select the schedule's path that divides by nothing; the count is not used.
        return loss, torch.zeros([], dtype=torch.int, device=loss.device), results

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=max(len(batch.token_ids) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
    )
