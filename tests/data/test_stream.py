"""The order of the rows: by seed and epoch alone, by weights where sources have them, and the same after a resume."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config_data import SourceConfig
from megarl.data.stream import PromptStream, check_enough, first_rows
from megarl.errors import ConfigError
from megarl.sample import Prompt, Sample


def numbered_prompts(count, source_index=0):
    texts = [[{"role": "user", "content": str(i)}] for i in range(count)]
    return [Prompt(texts[i], [i], source_index=source_index) for i in range(count)]


def ids(prompts):
    return [prompt.token_ids[0] for prompt in prompts]


def places(prompts):
    return [(prompt.source_index, *prompt.token_ids) for prompt in prompts]


def test_each_epoch_uses_every_prompt_once_though_steps_straddle_it():
    stream = PromptStream(numbered_prompts(10), seed=1)
    order = ids([prompt for _ in range(10) for prompt in stream.next(3)])
    epochs = [order[0:10], order[10:20], order[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_and_not_on_the_step_size():
    orders = [ids(PromptStream(numbered_prompts(10), seed).next(20)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    stream = PromptStream(numbered_prompts(10), seed=1)
    assert ids(stream.next(7) + stream.next(13)) == orders[0]


def test_the_order_stays_what_saved_runs_have_seen():
    assert ids(PromptStream(numbered_prompts(8), seed=1).next(8)) == [6, 3, 4, 5, 0, 2, 7, 1]
    assert ids(PromptStream(numbered_prompts(8), seed=1, weights=[2.0]).next(8)) == [6, 3, 4, 5, 0, 2, 7, 1]
    two = numbered_prompts(3) + numbered_prompts(2, source_index=1)
    weighted = PromptStream(two, seed=1, weights=[2.0, 1.0])
    assert places(weighted.next(6)) == [(0, 1), (0, 2), (1, 1), (0, 0), (0, 1), (1, 0)]


def test_without_weights_the_rows_of_all_sources_are_shuffled_together():
    prompts = numbered_prompts(6) + numbered_prompts(4, source_index=1)
    epoch = places(PromptStream(prompts, seed=1).next(10))
    assert sorted(epoch) == places(prompts) and epoch != places(prompts)
    assert {index for index, _ in epoch[:6]} == {0, 1}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 100)), min_size=2, max_size=6), st.integers(1, 150))
def test_with_weights_every_prefix_has_its_shares_to_within_one_and_sources_have_their_own_epochs(weights, num_rows):
    sizes = [3 + index for index in range(len(weights))]
    prompts = sum((numbered_prompts(size, index) for index, size in enumerate(sizes)), [])
    taken = places(PromptStream(prompts, 1, weights).next(num_rows))
    for n in range(1, num_rows + 1):
        for source, weight in enumerate(weights):
            count = sum(index == source for index, _ in taken[:n])
            assert abs(count - n * weight / sum(weights)) < 1 + 1e-9
    for source, size in enumerate(sizes):
        own = [row for index, row in taken if index == source]
        for start in range(0, len(own) - size, size):
            assert sorted(own[start : start + size]) == list(range(size))


@pytest.mark.parametrize("weights", [None, [3.0, 1.0]])
def test_a_resumed_stream_goes_on_in_the_same_order(weights):
    prompts = numbered_prompts(6) + numbered_prompts(4, source_index=1)
    whole = places(PromptStream(prompts, 4, weights).next(60))
    for num_before in range(31):  # at the ends of epochs and within them, over three of them
        stream = PromptStream(prompts, 4, weights)
        stream.next(num_before)
        for _ in range(2):  # twice within one epoch
            resumed = PromptStream(prompts, 4, weights)
            resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
            assert places(resumed.next(3)) == whole[num_before : num_before + 3]
        assert places(resumed.next(20)) == whole[num_before + 3 : num_before + 23]


def test_a_resume_with_other_rows_seed_or_weights_is_refused():
    prompts = numbered_prompts(6) + numbered_prompts(4, source_index=1)
    state = PromptStream(prompts, 4, [3.0, 1.0]).state_dict()
    other = numbered_prompts(6)[::-1] + prompts[6:]
    for stream, what in (
        (PromptStream(prompts, 5, [3.0, 1.0]), "given seed 5, but 4 where it was saved"),
        (PromptStream(prompts, 4, [2.0, 1.0]), r"given weights \[2.0, 1.0\], but \[3.0, 1.0\]"),
        (PromptStream(prompts, 4), "given weights None, but"),
        (PromptStream(prompts[1:], 4, [3.0, 1.0]), r"given rows \[5, 4\], but \[6, 4\]"),
        (PromptStream(other, 4, [3.0, 1.0]), "given digest [0-9a-f]{64}, but"),
    ):
        with pytest.raises(ConfigError, match=f"data.train: the order of the prompts cannot go on: {what}"):
            stream.load_state_dict(state)


def test_rows_of_samples_are_streamed_by_their_prompts_source():
    rows = [
        [Sample.from_response(prompt, [7], group_id=i, index=i, response_text="yes")]
        for i, prompt in enumerate(numbered_prompts(4) + numbered_prompts(4, source_index=1))
    ]
    stream = PromptStream(rows, 1, [1.0, 1.0])
    state = stream.state_dict()
    assert [row[0].prompt.source_index for row in stream.next(6)] == [0, 1] * 3
    rows[0][0].response_text = "no"
    with pytest.raises(ConfigError, match="digest"):
        PromptStream(rows, 1, [1.0, 1.0]).load_state_dict(state)


def test_held_out_rows_come_from_all_sources_in_turn():
    prompts = numbered_prompts(4) + numbered_prompts(2, source_index=1)
    assert places(first_rows(prompts, 5, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    assert first_rows(prompts[:4], 3, 1) == prompts[:3]


def test_a_stream_of_nothing_is_refused():
    for prompts, weights in (([], None), (numbered_prompts(3), [1.0, 1.0])):
        with pytest.raises(ConfigError, match="at least one prompt of every source"):
            PromptStream(prompts, 1, weights)


def sources(*weights):
    return [SourceConfig(path=f"{name}.jsonl", weight=weight) for name, weight in zip("ab", weights)]


def test_fewer_prompts_than_a_step_needs_is_refused():
    """O03."""
    prompts = numbered_prompts(5)
    for what in ("prompts after filtering", "rows"):
        with pytest.raises(ConfigError, match=rf"5 {what} < algorithm.prompts_per_step=8 \(a.jsonl\)"):
            check_enough(prompts, 8, sources(None), what)
    check_enough(prompts, 5, sources(None), "rows")


def test_a_source_too_small_for_its_share_of_a_step_is_refused():
    prompts = numbered_prompts(12) + numbered_prompts(3, source_index=1)
    check_enough(prompts, 12, sources(3.0, 1.0), "rows")
    check_enough(prompts, 15, sources(None, None), "rows")
    check_enough(prompts, 10, sources(0.7, 0.3), "rows")
    with pytest.raises(ConfigError, match=r"3 rows < 4, the share by weight 0.5 of .*prompts_per_step=8 \(b.jsonl\)"):
        check_enough(prompts, 8, sources(0.5, 0.5), "rows")
