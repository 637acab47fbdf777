"""Corrections for samples that the server drew from a policy other than the trainer's, as weights of their tokens.

The ratio of a token is p_trainer / p_server = exp(old_logprobs - rollout_logprobs). Rounding, kernels and an older
version of the weights make it differ from 1.
"""

import torch

from megarl.algorithms.kl import MAX_LOG_RATIO, k1, k3
from megarl.sample import Sample

# name -> (what is compared with [low, high], what becomes of a token outside)
CORRECTIONS: dict[str, tuple[str, str]] = {
    "token_tis": ("token", "truncate"),
    "sequence_tis": ("sequence", "truncate"),
    "token_mis": ("token", "mask"),
    "sequence_mis": ("sequence", "mask"),
    "icepop": ("token", "mask"),
    "geometric": ("geometric", "reject"),
}


def correction(
    samples: list[Sample], kind: str, low: float, high: float, veto: float | None = None
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """For each sample the weights [L] float32 of its tokens, 0 where loss_mask is False, and metrics over all samples.

    Weights are ratios of tokens or products of a sequence's ratios over its trained tokens; low = 0 leaves a side open:
    - token_tis, sequence_tis: the ratio, truncated to [low, high]. Truncated importance sampling, min(ratio, high):
      Yao et al., https://fengyao.notion.site/off-policy-rl; of sequences: Liu et al., "When Speed Kills Stability",
      https://richardli.xyz/rl-collapse.
    - token_mis, sequence_mis: the ratio, 0 outside [low, high]. Masked importance sampling: Liu et al.
    - icepop: token_mis by the name of its two-sided band, M(k; low, high) of Ring-1T (arXiv:2510.18855), equation 2.
    - geometric: 1 where the geometric mean of a sequence's ratios lies in [low, high], else 0: rejection alone. Li and
      Liu, part 3 of the same series, https://richardli.xyz/post/rl-collapse-part3.
    `veto`: a sequence with a trained token of a ratio below it gets 0 throughout, whatever the kind.

    log ratios are clamped to +-20. A NaN among the log-probs stays one in the weights: a loss that is no number stops
    an update, which leaving out a token in silence would not.

    Metrics, over trained tokens where not said otherwise, none if there are no such tokens: `ess`, effective sample
    size (sum w)^2 / sum w^2 as a share of the tokens; `clipped` and `masked`, shares truncated and set to 0; `vetoed`,
    share of the sequences; `kl_k1` and `kl_k3`, of KL(server || trainer); `perplexity_gap`, exp of the mean negative
    log-prob, the trainer's less the server's.
    """
    assert kind in CORRECTIONS, f"correction {kind!r}: {', '.join(CORRECTIONS)}"
    assert 0 <= low <= 1 <= high, f"low {low}, high {high}: a ratio of 1 must lie between them, and low >= 0"
    compared, outcome = CORRECTIONS[kind]
    weights, clipped, vetoed = [], 0, 0
    for sample in samples:
        log_ratios_N = (sample.trained("old_logprobs") - sample.trained("rollout_logprobs")).double()
        weights_N, outside_N = _weigh(_ratios(log_ratios_N, compared), low, high, outcome)
        is_vetoed = veto is not None and bool((_ratios(log_ratios_N, "token") < veto).any())
        if is_vetoed:
            weights_N = torch.zeros_like(weights_N)
        elif outcome == "truncate":
            clipped += int(outside_N.sum())
        vetoed += is_vetoed
        full_L = torch.zeros(len(sample.token_ids))
        full_L[sample.loss_mask] = weights_N.float()
        weights.append(full_L)
    return weights, _metrics(samples, weights, clipped, vetoed)


def _ratios(log_ratios_N: torch.Tensor, compared: str) -> torch.Tensor:
    """[N] trained tokens of one sequence -> [N]: each one's ratio, or that of the sequence at each."""
    if compared == "sequence":
        log_ratios_N = log_ratios_N.sum().expand_as(log_ratios_N)
    if compared == "geometric":
        log_ratios_N = log_ratios_N.mean().expand_as(log_ratios_N)
    return torch.exp(torch.clamp(log_ratios_N, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _weigh(ratios_N: torch.Tensor, low: float, high: float, outcome: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, outside) [N]."""
    outside_N = (ratios_N < low) | (ratios_N > high)  # False for NaN, which stays
    if outcome == "truncate":
        return torch.clamp(ratios_N, low, high), outside_N
    kept_N = ratios_N if outcome == "mask" else torch.where(ratios_N.isnan(), ratios_N, 1.0)
    return torch.where(outside_N, 0.0, kept_N), outside_N


def _metrics(samples: list[Sample], weights: list[torch.Tensor], clipped: int, vetoed: int) -> dict[str, float]:
    weights_N = torch.cat([w[sample.loss_mask] for w, sample in zip(weights, samples, strict=True)]).double()
    if not len(weights_N):
        return {}
    old_N = torch.cat([sample.trained("old_logprobs") for sample in samples]).double()
    rollout_N = torch.cat([sample.trained("rollout_logprobs") for sample in samples]).double()
    squares = weights_N.square().sum().item()
    return {
        "ess": weights_N.sum().item() ** 2 / squares / len(weights_N) if squares else 0.0,
        "clipped": clipped / len(weights_N),
        "masked": (weights_N == 0).double().mean().item(),
        "vetoed": vetoed / len(samples),
        "kl_k1": k1(rollout_N, old_N).mean().item(),
        "kl_k3": k3(rollout_N, old_N).mean().item(),
        "perplexity_gap": (torch.exp(-old_N.mean()) - torch.exp(-rollout_N.mean())).item(),
    }
