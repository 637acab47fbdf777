from megarl.warm_start import shuffled_batches


def test_an_epoch_uses_every_sample_once_and_the_order_follows_the_seed():
    batches = list(shuffled_batches(list(range(5)), batch_size=2, num_batches=5, seed=1))
    flat = [sample for batch in batches for sample in batch]
    assert [len(batch) for batch in batches] == [2] * 5
    assert sorted(flat[:5]) == sorted(flat[5:]) == list(range(5)) and flat[:5] != flat[5:]
    again, other = (list(shuffled_batches(list(range(5)), 2, 5, seed)) for seed in (1, 2))
    assert batches == again != other
