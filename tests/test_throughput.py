"""The benchmark of whole steps counts right, tells slower from noise, and goes on after a failure; the gate closes."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from end_to_end import ROOT
from ranks import run_ranks

sys.path.insert(0, str(ROOT / "benchmarks"))
import cpu_gate
from shapes import SHAPES
from throughput import compare_files, models_of, problems_of, share, values_of
from throughput_figures import Layout, compare, figures, layout_of, step_row, table
from throughput_inputs import write_prompts

from megarl.config import Config, DataConfig
from megarl.data.chat import load_tokenizer
from megarl.data.dataset import load_prompts
from megarl.engine.hf.flops import forward_flops
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError

SHAPE = ModelShape.from_hf(SHAPES["qwen2.5-1.5b"])
LAYOUT = Layout(
    num_gpus=3,
    actor_gpus=2,
    server_gpus=1,
    shape=SHAPE,
    samples_per_step=100,
    group_size=10,
    training_forwards=3,
    scoring_forwards=2,
    peak_tflops=1000.0,
    settings={},
)
METRICS = {
    "time/step_s": 10.0,
    "time/generate_s": 4.0,
    "time/logprob_s": 1.0,
    "time/update_s": 2.0,
    "time/sync_s": 0.5,
    "time/offload_s": 1.0,
    "time/save_s": 0.25,
    "perf/tokens_per_s": 12_000.0,
    "response/length_mean": 900.0,
    "sync/gb_per_s": 50.0,
    "memory/update_gpu_gb": 70.0,
}


def test_a_step_is_taken_apart_into_phases_and_rates_of_a_gpu():
    row = step_row(METRICS, LAYOUT)
    assert row["rest_s"] == 1.5  # what has no name of its own, saving included
    assert row["tokens"] == 120_000 and row["response_tokens"] == 90_000
    assert row["tokens_per_s_per_gpu"] == 4000 and row["response_tokens_per_s_per_gpu"] == 3000
    assert row["generate_tokens_per_s_per_gpu"] == 22_500
    tflop = 100 * forward_flops(SHAPE, 1200) / 1e12  # of one pass over all samples
    assert row["update_tflops_per_gpu"] == pytest.approx(3 * tflop / 2.0 / 2, rel=1e-4)
    assert row["logprob_mfu"] == pytest.approx(2 * tflop / 1.0 / 2 / 1000, rel=1e-4)
    assert row["sync_gb_per_s"] == 50 and row["memory_update_gpu_gb"] == 70


def test_dynamic_sampling_is_paid_for_what_it_generates():
    row = step_row(METRICS | {"dynamic_sampling/generated_groups": 20}, LAYOUT)
    assert row["response_tokens"] == 180_000
    assert row["update_tflops_per_gpu"] == pytest.approx(3 * 100 * forward_flops(SHAPE, 600) / 1e12 / 4, rel=1e-4)


@pytest.mark.parametrize("placement, gpus", [("colocated", 4), ("disaggregated", 6)])
def test_gpus_are_those_that_the_run_holds(toy_folder, placement, gpus):
    config = Config.model_validate(
        {
            "name": "x",
            "placement": placement,
            "model": {"path": str(toy_folder / "model")},
            "data": {"train": "t"},
            "algorithm": {"epochs": 2, "old_logprobs": "rollout"},
            "roles": {"actor": {"gpus_per_node": 4, "lora": {"rank": 4}}},
            "rollout": {"servers": 2},
        }
    )
    layout = layout_of(config, "NVIDIA H200 NVL")
    assert (layout.num_gpus, layout.actor_gpus, layout.server_gpus) == (gpus, 4, 2)
    assert layout.peak_tflops == 989
    assert layout.training_forwards == 4  # two epochs; adapters need no gradient by the frozen weights
    assert layout.scoring_forwards == 1  # the reference alone


def point(label, seconds):
    other = {f"{name}_s": 0.0 for name in ("generate", "reward", "logprob", "offload", "rest")}
    steps = [other | {"step_s": s, "update_s": 0.5 * s, "sync_s": 0.01 * s} for s in seconds]
    return {"label": label, "steps": steps, "figures": figures(steps)}


def test_figures_are_medians_and_quartiles():
    found = point("a", [1.0, 2.0, 3.0, 4.0, 50.0])["figures"]["step_s"]
    assert found == {"min": 1.0, "low": 2.0, "median": 3.0, "high": 4.0, "max": 50.0}


def test_a_comparison_tells_slower_from_noise():
    before = [10.0, 10.1, 9.9, 10.2, 10.0]
    slower, same, faster = [11.0, 11.1, 10.9, 11.2, 11.0], [10.1, 9.9, 10.3, 9.8, 10.1], [8.0, 8.1, 7.9, 8.2, 8.0]
    points = [point(name, before) for name in ("slower", "same", "faster", "gone")]
    others = [point("slower", slower), point("same", same), point("faster", faster), point("new", before)]
    changes = {(c.label, c.key): c for c in compare(points, others)}
    labels = ("slower", "same", "faster")
    assert changes.keys() == {(label, key) for label in labels for key in ("step_s", "update_s", "sync_s")}
    assert [changes[label, "step_s"].verdict for label in labels] == ["slower", "within noise", "faster"]
    step = changes["slower", "step_s"]
    assert step.ratio == pytest.approx(1.1) and 1.07 < step.low <= 1.1 <= step.high < 1.14
    assert step.is_slower_than(0.05) and not step.is_slower_than(0.15)
    assert not changes["same", "step_s"].is_slower_than(0.0)
    assert not changes["slower", "sync_s"].is_slower_than(0.05)  # a hundredth of the step is not judged


def test_the_noise_band_holds_two_measurements_of_the_same_code():
    generator = np.random.default_rng(3)
    alarms = 0
    for _ in range(100):
        points = [[point("a", generator.normal(10.0, 0.5, 5))] for _ in range(2)]
        alarms += compare(*points)[0].verdict != "within noise"
    assert alarms <= 20  # 5 steps are few: 5 % where there are many


def test_a_comparison_fails_where_it_is_asked_to(tmp_path, capsys):
    report = {"machine": {}, "versions": {}, "git": "a", "warmup": 1, "repeats": 5}
    for name, factor in (("before", 1.0), ("after", 1.1)):
        points = [point("a", factor * np.array([10.0, 10.1, 9.9, 10.2, 10.0]))]
        (tmp_path / name).write_text(json.dumps(report | {"points": points, "git": name}))
    files = tmp_path / "before", tmp_path / "after"
    assert compare_files(*files, limit=None) == 0
    assert compare_files(*files, limit=0.2) == 0
    assert compare_files(*reversed(files), limit=0.0) == 0
    capsys.readouterr()
    assert compare_files(*files, limit=share("5%")) == 1
    output = capsys.readouterr().out
    assert "git: before -> after" in output and "slower than 5%: a: step_s x 1.100" in output
    (tmp_path / "after").write_text(json.dumps(report | {"points": []}))
    assert compare_files(*files, limit=None) == 2


def test_a_sweep_splits_at_the_commas_between_values():
    assert values_of("a.b=1,2") == ["a.b=1", "a.b=2"]
    assert values_of("a={x: [1, 2], y: 3},null") == ["a={x: [1, 2], y: 3}", "a=null"]


def test_overrides_belong_to_the_model_before_them():
    assert models_of(["a=1", "toy", "b=2", "c=3", "qwen"]) == [("toy", ["a=1", "b=2", "c=3"]), ("qwen", ["a=1"])]


def options(**given):
    lists = {"points": [], "sweep": [], "models": [("toy", [])]}
    return SimpleNamespace(**lists | {"compare": None, "warmup": 1, "repeats": 1} | given)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"models": []}, "which model"),
        ({"models": [("qwen", [])]}, "qwen: neither a folder nor one of toy"),
        ({"warmup": 0}, "--warmup 0"),
        ({"sweep": ["seed"]}, "--sweep seed"),
        ({"models": [("toy", ["seed=1"])], "sweep": ["seed=1,2"]}, "toy: seed is given twice"),
        ({"compare": ("a", "b"), "points": ["toy"]}, "toy: nothing is measured"),
    ],
)
def test_arguments_that_make_no_sense_are_named(given, named):
    assert named in "; ".join(problems_of(options(**given)))
    assert not list(problems_of(options()))


@pytest.mark.parametrize("length", [20, 111])
def test_prompts_have_exactly_the_length(toy_folder, tmp_path, length):
    model, file = str(toy_folder / "model"), tmp_path / "prompts.jsonl"
    write_prompts(file, 30, length, model, None, seed=1)
    data = DataConfig(train=str(file), max_prompt_tokens=length)
    prompts = load_prompts(data.train, data, load_tokenizer(model), 256)
    assert [len(prompt.token_ids) for prompt in prompts] == [length] * 30
    assert len({tuple(prompt.token_ids) for prompt in prompts}) == 30
    with pytest.raises(ConfigError, match="max_prompt_tokens=3: the chat template alone has"):
        write_prompts(file, 30, 3, model, None, seed=1)


def throughput(*arguments, timeout_s=60):
    command = [sys.executable, ROOT / "benchmarks/throughput.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def test_a_failed_point_is_recorded_and_the_sweep_goes_on(tmp_path):
    out = tmp_path / "out.json"
    done = throughput("toy", "--device", "cpu", "--sweep", "roles.actor.tensor_parallel=3,5", "--out", out)
    assert done.returncode == 1, done.stderr
    report = json.loads(out.read_text())
    assert [p["overrides"] for p in report["points"]] == [[f"roles.actor.tensor_parallel={n}"] for n in (3, 5)]
    assert all("tensor_parallel" in p["failed"] and p["steps"] == [] for p in report["points"])
    assert "failed" in table(report["points"]) and "roles.actor.tensor_parallel=3,5" in report["command"]


@pytest.mark.soak
@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_a_real_run_is_measured_and_profiled(tmp_path, placement):
    sweep = ["--sweep", "algorithm.prompts_per_step=4", "rollout.server_args.max_total_tokens=4096,nonsense"]
    done = throughput("toy", "--device", "cpu", "--placement", placement, "--warmup", 1, "--repeats", 2, "--out",
                      tmp_path / "out.json", "--profile", tmp_path / "profile", "--folder", tmp_path / "runs", *sweep,
                      timeout_s=600)  # fmt: skip
    assert done.returncode == 1, done.stderr
    good, bad = json.loads((tmp_path / "out.json").read_text())["points"]
    assert "failed" not in good and "exit code" in bad["failed"]
    assert len(good["steps"]) == 2 and all(step["tokens"] > 4 * 8 * 64 for step in good["steps"])
    for step in good["steps"]:
        phases = [value for key, value in step.items() if key.endswith("_s") and key not in
                  ("step_s", "sync_verify_s", "outside_s") and "per" not in key]  # fmt: skip
        assert sum(phases) == pytest.approx(step["step_s"], rel=1e-3)
        assert (step["offload_s"] > 0) == (placement == "colocated")
    assert good["during"]["host_memory_gb"]["median"] > 0
    (folder,) = [folder for folder in (tmp_path / "profile").iterdir() if (folder / "actor-0.json.gz").exists()]
    assert "Trainer.step" in (folder / "driver.txt").read_text()
    assert "aten::" in (folder / "actor-0.txt").read_text()


def half_as_fast(function):
    """Works, then burns as much CPU time again."""

    def slow(*arguments, **keywords):
        start = time.process_time()
        result = function(*arguments, **keywords)
        took = time.process_time() - start
        while time.process_time() < start + 2 * took:
            pass
        return result

    return slow


def gate(rank):
    from megarl.engine.engine import Engine

    as_it_is = cpu_gate.engine_ratios()
    Engine._run = half_as_fast(Engine._run)  # the forward and backward passes
    return as_it_is, cpu_gate.engine_ratios()


def test_the_engine_is_as_fast_as_it_was_and_the_gate_sees_when_it_is_not():
    ((as_it_is, slow),) = run_ranks(gate, 1)
    assert cpu_gate.too_slow(as_it_is) == []
    train_step, logprobs = cpu_gate.too_slow(slow)
    assert train_step.startswith("train_step: ") and logprobs.startswith("logprobs: ")


def test_limits_of_the_gate_are_above_all_that_was_measured():
    kept = json.loads(cpu_gate.RESULTS.read_text())["ratios"]
    assert kept.keys() == cpu_gate.AGAINST.keys()
    for name, ratio in kept.items():
        assert ratio["limit"] == pytest.approx(cpu_gate.AGAINST[name][1] * ratio["reference"], abs=1e-3)
        assert len(ratio["alone"]) >= 10 and len(ratio["beside"]) >= 10
        measured = ratio["alone"] + ratio["beside"]
        assert 1.1 * max(measured) < ratio["limit"] < 2 * min(measured)  # so what takes twice as long is seen
