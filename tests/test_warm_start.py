from megarl.config import WarmStartConfig
from megarl.warm_start import rate_factor, shuffled_batches


def test_rate_rises_stays_and_falls_to_its_final_share():
    settings = WarmStartConfig(steps=100, warmup_steps=10, decay_from=0.5, final_fraction=0.1)
    factors = {step: round(rate_factor(settings, step), 6) for step in (1, 5, 10, 50, 75, 100)}
    assert factors == {1: 0.1, 5: 0.5, 10: 1.0, 50: 1.0, 75: 0.55, 100: 0.1}


def test_an_epoch_uses_every_sample_once_and_the_order_follows_the_seed():
    batches = list(shuffled_batches(list(range(5)), batch_size=2, num_batches=5, seed=1))
    flat = [sample for batch in batches for sample in batch]
    assert [len(batch) for batch in batches] == [2] * 5
    assert sorted(flat[:5]) == sorted(flat[5:]) == list(range(5)) and flat[:5] != flat[5:]
    assert batches == list(shuffled_batches(list(range(5)), 2, 5, seed=1)) != list(shuffled_batches(list(range(5)), 2, 5, seed=2))
