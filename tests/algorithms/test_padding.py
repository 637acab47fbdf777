"""Untrained tokens between and behind a sample's own, with NaN in every field, change nothing at the trained ones."""

import random

import pytest
import torch

from megarl.algorithms.advantages import (
    distillation,
    dr_grpo,
    gdpo,
    grpo,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
)
from megarl.algorithms.gae import gae
from megarl.algorithms.off_policy import CORRECTIONS, correction
from megarl.algorithms.shaping import kl_penalties, subtract_penalties
from megarl.algorithms.whitening import whiten_advantages
from megarl.sample import Prompt, Sample

FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "teacher_logprobs", "values", "advantages")


def random_samples():
    draw = random.Random(0)
    samples = []
    for index in range(12):
        prompt, response = [1] * draw.randint(1, 3), [5] * draw.randint(1, 8)
        sample = Sample.from_response(Prompt([], prompt), response, group_id=index // 4, index=index)
        sample.reward_parts = {"a": draw.gauss(0, 1), "b": draw.gauss(3, 2)}
        sample.reward = sum(sample.reward_parts.values())
        for name in FIELDS:
            setattr(sample, name, torch.tensor([draw.gauss(-1, 0.3) for _ in sample.token_ids]))
        samples.append(sample)
    return samples


def padded(sample, draw):
    """A copy with 0 to 3 more tokens before each one of the response and at the end, and where its own tokens are."""
    sources = []
    for t in range(len(sample.token_ids) + 1):
        sources += [-1] * (draw.randint(0, 3) if t >= sample.prompt_length else 0) + [t]
    sources = torch.tensor(sources[:-1])
    own = sources >= 0
    other = Sample(
        prompt=sample.prompt,
        group_id=sample.group_id,
        index=sample.index,
        prompt_length=sample.prompt_length,
        token_ids=torch.where(own, sample.token_ids[sources], 0),
        loss_mask=own & sample.loss_mask[sources],
        reward=sample.reward,
        reward_parts=sample.reward_parts,
        **{name: torch.where(own, getattr(sample, name)[sources], float("nan")) for name in FIELDS},
    )
    return other, own


def with_penalties(estimator):
    return lambda samples: estimator(samples, penalties=kl_penalties(samples, 0.1, "k3"))


def rloo_with_kl(samples):
    subtract_penalties(samples, kl_penalties(samples, 0.1, "k1"))
    rloo(samples)


def corrected(kind):
    def fill(samples):
        weights, _ = correction(samples, kind, low=0.8, high=1.3, veto=0.5)
        for sample, weights_L in zip(samples, weights):
            sample.advantages = weights_L

    return fill


FILLS = {  # each fills .advantages
    "grpo": lambda samples: grpo(samples, normalize_by_std=True),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "rloo with kl": rloo_with_kl,
    "opo": opo,
    "reinforce_plus_plus": with_penalties(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gdpo": gdpo,
    "distillation": distillation,
    "gae": with_penalties(lambda samples, penalties: gae(samples, 0.99, 0.95, returns_lam=1.0, penalties=penalties)),
    "length-adaptive gae": lambda samples: gae(samples, 1.0, length_adaptive_alpha=0.3),
    "whitening": whiten_advantages,
    **{kind: corrected(kind) for kind in CORRECTIONS},
}


@pytest.mark.parametrize("name", FILLS)
def test_untrained_tokens_between_and_behind_change_nothing_at_the_trained_ones(name):
    draw = random.Random(1)
    samples = random_samples()
    others = [padded(sample, draw) for sample in samples]
    assert sum(len(own) for _, own in others) > 1.5 * sum(len(sample.token_ids) for sample in samples)
    FILLS[name](samples)
    FILLS[name]([other for other, _ in others])
    for sample, (other, own) in zip(samples, others):
        assert torch.equal(other.advantages[own], sample.advantages) and not other.advantages[~own].any()
        if sample.returns is not None:
            assert torch.equal(other.returns[own], sample.returns) and not other.returns[~own].any()
    assert any(sample.advantages.any() for sample in samples)
