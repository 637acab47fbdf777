"""The kept figures hold what the README says of them, and the benchmarks run."""

import json
import subprocess
import sys

import pytest
from end_to_end import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from algorithms import RUNS
from rewards import CASES as REWARD_CASES
from trace_summary import span_and_busy


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


def test_kept_figures_show_that_it_learns_under_every_algorithm_as_the_readme_says():
    runs = json.loads((ROOT / "benchmarks/results/algorithms_cpu.json").read_text())["runs"]
    readme = (ROOT / "megarl/algorithms/README.md").read_text()
    assert list(runs) == list(RUNS)
    for label, run in runs.items():
        first, last, before, after = (run[key] for key in ("first_10", "last_10", "held_out_before", "held_out_after"))
        assert run["overrides"] == RUNS[label] and last - first >= 0.25 and after - before >= 0.25
        assert f"| {label} | {first:.2f} -> {last:.2f} ({last - first:+.2f}) | {before:.2f} -> {after:.2f} |" in readme


def test_kept_figures_of_rewards_are_those_of_the_readme_and_half_of_the_responses_are_right():
    results = json.loads((ROOT / "benchmarks/results/rewards_cpu.json").read_text())["results"]
    readme = (ROOT / "megarl/rewards/README.md").read_text()
    assert list(results) == list(REWARD_CASES)
    for label, result in results.items():
        assert f"| {label} | {result['round_s']:.2f} s | {result['responses_per_s']:,} |" in readme
    assert all(
        results[label]["reward_mean"] == 0.5 for label in results if label.startswith(("math", "code", "gsm8k,"))
    )


def test_kept_trainer_figures_reach_the_bare_loop_of_their_run():
    reports = json.loads((ROOT / "benchmarks/results/trainer_2xh200.json").read_text())
    pairs = 0
    for report in reports:
        speed = {
            (c["shape"], c["layout"], c["contender"]): c["tokens_per_s_per_gpu"]
            for c in report["cases"]
            if "failed" not in c
        }
        for (shape, layout, contender), bare in speed.items():
            if contender == "bare-te":
                pairs += 1
                assert speed[shape, layout, "engine-te"] >= 0.95 * bare, (report["state"], shape, layout)
    assert pairs >= 4


def test_kept_weight_sync_figures_have_the_required_rate_within_two_buffers_of_1_gib():
    after, before = json.loads((ROOT / "benchmarks/results/weight_sync_2xh200.json").read_text())
    speed = {push["bucket_mb"]: push["gb_per_s"] for push in after["pushes"]}
    assert after["shape"] == "qwen2.5-7b" and speed[1024] >= 200
    assert all(speed[push["bucket_mb"]] > push["gb_per_s"] for push in before["pushes"] if push["bucket_mb"] in speed)


def test_kept_figures_of_conversions_are_those_of_the_readme_and_do_not_grow_with_the_layers():
    results = json.loads((ROOT / "benchmarks/results/convert_cpu.json").read_text())["results"]
    readme = (ROOT / "megarl/checkpoint/README.md").read_text()
    for result in results:
        peaks = [result[direction]["peak_gb"] for direction in ("to_megatron", "to_hf")]
        assert f"| {result['layers']} | {result['model_gb']} GB | {peaks[0]} GB | {peaks[1]:.2f} GB |" in readme
        assert max(peaks) < 2.5 * result["largest_tensor_gb"] < result["model_gb"]


def test_kept_figures_of_checkpoints_are_those_of_the_readme():
    (case,) = json.loads((ROOT / "benchmarks/results/checkpoint_h200.json").read_text())["cases"]
    readme = " ".join((ROOT / "megarl/checkpoint/README.md").read_text().split())
    first, then = case["first"], case["second"]
    assert f"{case['gb']:.1f} GB, one H200" in readme and f"waits {then['copy_s']:.2f} s for the copy" in readme
    assert f"at the first save {first['copy_s']:.1f} s" in readme and f"written in {then['write_s']:.0f} s" in readme
    assert f"steps take {then['step_while_writing_s']:.2f} s in place of {case['step_s']:.2f} s" in readme
    assert f"checked in {case['verify_s']:.1f} s; loading takes {case['load_s']:.0f} s" in readme


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_the_weight_sync_benchmark_runs_on_a_cpu(tmp_path, placement):
    command = [sys.executable, ROOT / "benchmarks/weight_sync.py", "--device", "cpu", "--shape", "tiny", "--dtype", "float32",
               "--placement", placement, "--buckets", "1", "--pushes", "2", "--out", tmp_path / "out.json"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    ((push,),) = [json.loads((tmp_path / "out.json").read_text())["pushes"]]
    assert push["gb_per_s"] >= 0 and push["canary_diff"] < 1e-5


@pytest.mark.parametrize("layout", ["dp1"])
def test_the_trainer_benchmark_runs_on_a_cpu(tmp_path, layout):
    command = [sys.executable, ROOT / "benchmarks/trainer.py", "--shapes", "tiny", "--layouts", layout, "--contenders", "bare-local",
               "engine-local", "--dtype", "float32", "--length", "32", "--steps", "1", "--warmup", "1", "--microbatches", "2",
               "--out", tmp_path / "out.json"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [case["contender"] for case in report["cases"]] == ["bare-local", "engine-local"]
    assert all(case["tokens_per_s_per_gpu"] > 0 for case in report["cases"])
    assert result.stdout.rstrip().splitlines()[-1].startswith("| tiny | dp1 | engine-local |")


def test_busy_time_counts_overlapping_work_once():
    work = [{"ts": 10.0, "dur": 5.0}, {"ts": 12.0, "dur": 1.0}, {"ts": 14.0, "dur": 4.0}, {"ts": 30.0, "dur": 2.0}]
    assert span_and_busy(work) == (22.0, 10.0)
