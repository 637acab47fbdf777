"""What changes rewards before advantages are computed and loss masks after, and which groups have advantages at all."""

import torch

from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.losses import masked
from megarl.sample import Sample, Status


def overlong_penalties(samples: list[Sample], max_tokens: int, buffer_tokens: int, penalty: float) -> list[float]:
    """What is to be added to each sample's reward for the length of its response: 0 up to max_tokens - buffer_tokens,
    from there falling linearly to -penalty at max_tokens, and no further.

    Soft overlong punishment, DAPO (arXiv:2503.14476), section 3.4, equation 13: L_max is `max_tokens`, L_cache
    `buffer_tokens`.
    """
    assert 0 < buffer_tokens <= max_tokens, f"buffer_tokens {buffer_tokens}, max_tokens {max_tokens}: 0 < buffer <= max"
    shares = [(max_tokens - buffer_tokens - sample.response_length) / buffer_tokens for sample in samples]
    return [penalty * min(max(share, -1.0), 0.0) for share in shares]


def mask_truncated(samples: list[Sample]) -> int:
    """Train no token of truncated samples; returns their number. After the advantages, so that their rewards are in the
    statistics of their group; their own advantages and returns become 0.

    Overlong filtering, DAPO (arXiv:2503.14476), section 3.4. Old tensors are replaced and not written to.
    """
    truncated = [sample for sample in samples if sample.status is Status.TRUNCATED]
    for sample in truncated:
        sample.loss_mask = torch.zeros_like(sample.loss_mask)
        for name in ("advantages", "returns"):
            if (values_L := getattr(sample, name)) is not None:
                setattr(sample, name, torch.zeros_like(values_L))
    return len(truncated)


def kl_penalties(samples: list[Sample], coefficient: float, estimator: str) -> list[torch.Tensor]:
    """For each sample [L] float32: coefficient * KL(policy || reference) at each token by KL_ESTIMATORS[estimator], 0
    where loss_mask is False, whatever the log-probs are there. To be taken off the reward, by `gae` and
    `reinforce_plus_plus` at each token, by `subtract_penalties` as a whole.
    """
    penalties = []
    for sample in samples:
        old_logprobs_L = masked(sample.require("old_logprobs"), sample.loss_mask)
        ref_logprobs_L = masked(sample.require("ref_logprobs"), sample.loss_mask)
        penalties.append(coefficient * KL_ESTIMATORS[estimator](old_logprobs_L, ref_logprobs_L))
    return penalties


def subtract_penalties(samples: list[Sample], penalties: list[torch.Tensor]) -> None:
    """Take the sum of a sample's penalties [L] over its trained tokens off its `.reward`: for estimators that know one
    reward per sequence.

    With k1 it is R = r - beta log(p / p_reference), Ahmadian et al. (arXiv:2402.14740), equation 3.
    """
    for sample, penalties_L in zip(samples, penalties, strict=True):
        sample.reward = sample.require("reward") - penalties_L[sample.loss_mask].double().sum().item()


def is_informative(group: list[Sample], parts: list[str] | None = None) -> bool:
    """Whether the rewards of a group differ, so that it has advantages other than 0: what dynamic sampling keeps.

    DAPO (arXiv:2503.14476), section 3.2, equation 11: 0 < correct answers < group size, for rewards of two values.
    `parts`: whether one of these parts of them does, for GDPO.
    """
    if parts is None:
        return any(sample.require("reward") != group[0].reward for sample in group)
    return any(sample.reward_parts[part] != group[0].reward_parts[part] for sample in group for part in parts)
