"""The critic's loss; a sum of per-token terms like the losses of losses.py."""

import torch

from megarl.algorithms.losses import aggregate, masked
from megarl.sample import Batch


def value_loss(
    values: torch.Tensor,
    batch: Batch,
    clip: float | None,
    loss_aggregation: str = "token_mean",
    aggregation_length: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """0.5 * max((V - R)^2, (V_clipped - R)^2) with V_clipped = clip(V, V_old - clip, V_old + clip), R = batch.returns
    and V_old = batch.values; 0.5 * (V - R)^2 without `clip`.

    PPO (arXiv:1707.06347) equation 9's L^VF; 0.5 and the clip are from its authors' code, Engstrom et al.
    (arXiv:2005.12729), "Value function clipping". `values`: [T] float32, aligned with batch.token_ids; what it holds
    where loss_mask is False is never looked at. Metrics, as sums over trained tokens: `value_clipped`, tokens whose
    gradient the clip stopped; `value_error`, (V - R)^2.
    """
    assert batch.returns is not None, "the batch has no returns"
    assert clip is None or batch.values is not None, "a clip without the old values of the batch"
    values = masked(values, batch.loss_mask)
    returns = masked(batch.returns, batch.loss_mask)
    errors_T = (values - returns).square()
    largest_T = errors_T
    if clip is not None:
        old_values = masked(batch.values, batch.loss_mask)
        clipped_values_T = old_values + torch.clamp(values - old_values, -clip, clip)
        largest_T = torch.maximum(errors_T, (clipped_values_T - returns).square())
    metrics = {"value_clipped": (largest_T > errors_T).sum().float(), "value_error": errors_T.detach().sum()}
    return aggregate(0.5 * largest_T, batch, loss_aggregation, aggregation_length), metrics
