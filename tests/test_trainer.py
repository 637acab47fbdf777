from types import SimpleNamespace

import pytest

from megarl.errors import RunError
from megarl.trainer import Trainer, shuffle_rewards


@pytest.mark.parametrize(
    "dtype, limit, difference, stops",
    [
        ("float32", None, 9e-5, False),
        ("float32", None, 2e-4, True),
        ("bfloat16", None, 0.04, False),
        ("bfloat16", None, 0.06, True),
        ("bfloat16", 0.01, 0.04, True),
        ("float32", None, float("nan"), True),
    ],
)
def test_a_run_stops_where_trainer_and_server_disagree_at_first(dtype, limit, difference, stops):
    config = SimpleNamespace(model=SimpleNamespace(dtype=dtype), rollout=SimpleNamespace(logprob_diff_limit=limit))
    trainer = SimpleNamespace(config=config)
    if stops:
        with pytest.raises(RunError, match="rollout/logprob_diff_mean is .* above its limit"):
            Trainer.check_agreement(trainer, difference)
    else:
        Trainer.check_agreement(trainer, difference)


def test_shuffled_rewards_are_a_permutation_that_the_seed_and_step_decide():
    def shuffled(seed, step):
        samples = [SimpleNamespace(reward=float(i)) for i in range(20)]
        shuffle_rewards(samples, seed, step)
        return [sample.reward for sample in samples]

    assert sorted(shuffled(1, 1)) == [float(i) for i in range(20)] != shuffled(1, 1)
    assert shuffled(1, 1) == shuffled(1, 1) != shuffled(1, 2)
