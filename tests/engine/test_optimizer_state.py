"""Any range of a tensor's entries as boxes, against numpy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.engine.optimizer_state import boxes

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)
RANGES = SHAPES.flatmap(
    lambda shape: st.tuples(
        st.just(tuple(shape)), st.integers(0, int(np.prod(shape))), st.integers(0, int(np.prod(shape)))
    )
)


@settings(max_examples=500, deadline=None)
@given(RANGES)
def test_boxes_are_the_entries_of_a_range_one_after_another(case):
    shape, begin, end = case
    entries = np.arange(np.prod(shape)).reshape(shape)
    found = []
    for corner, sizes, offset in boxes(shape, begin, end):
        assert offset == len(found) and len(corner) == len(sizes) == len(shape)
        box = entries[tuple(slice(start, start + size) for start, size in zip(corner, sizes))]
        assert box.shape == sizes
        found += box.flatten().tolist()
    assert found == list(range(begin, end))
    assert len(list(boxes(shape, begin, end))) <= 2 * len(shape) - 1
