"""The kept figures of the quickstart hold what the README says of them."""

import json

from end_to_end import ROOT


def test_kept_quickstart_figures_show_that_it_learns():
    report = json.loads((ROOT / "benchmarks/results/quickstart_cpu.json").read_text())
    runs = report["runs"]
    assert runs.keys() == {"seed 1", "seed 2", "seed 3", "shuffled"}
    for label, run in runs.items():
        assert run["wall_s"] < 360
        rise, held_out = run["last_10"] - run["first_10"], run["held_out_after"] - run["held_out_before"]
        if label == "shuffled":
            assert abs(rise) < 0.1 and held_out < 0.1
        else:
            assert rise >= 0.25 and held_out >= 0.25
