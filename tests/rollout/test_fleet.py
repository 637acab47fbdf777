"""A server that hangs in a push, or dies while it generates, is started again and serves with the present weights."""

import pytest
from server_faults import survive


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_server_that_hangs_or_dies_is_started_again_and_takes_the_weights_before_it_serves(tmp_path, placement):
    seen = survive(tmp_path, "cpu", placement=placement)
    lines = "\n".join(seen.lines)
    assert len(seen.killed) == 1 and seen.num_samples == 16 * 8
    assert seen.versions == [(2, 2)]  # what it read from disk never came through
    assert seen.restarts == (2 if placement == "disaggregated" else 1), lines
    assert all(metrics["sync/canary_diff"] < 1e-5 for metrics in seen.metrics)
    if placement == "disaggregated":
        assert (
            "weight sync to version 2, stage 0" in lines
            and "bucket 1 of 1: not received by all servers within 10 s" in lines
        )
    assert "3 health checks in a row failed" in lines and "is back" in lines
