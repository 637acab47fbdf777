"""`megarl plot`: what is drawn is what metrics.jsonl has."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from megarl import cli, plot
from megarl.errors import ConfigError

STEPS = 8


def rl_line(step: int, seed: int = 0) -> dict:
    return {
        "step": step,
        "reward/mean": 0.1 * step + 0.01 * seed,
        "kl/ref": 1e-3 * step * (1 + seed),
        "entropy": 1.0 / step,
        "response/length_mean": 6.0 + seed,
        "grad_norm": 0.5 + 0.1 * (step % 2),
        "rollout/logprob_diff_mean": 1e-7 * step,
        "time/generate_s": 0.2 + 0.1 * seed,
        "time/reward_s": 0.0,
        "time/update_s": 0.1 * step,
        "time/step_s": 0.5 + 0.1 * step + 0.1 * seed,
    }


def write(path: Path, lines: list[dict]) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rl_run(path: Path, seed: int = 0, steps: int = STEPS) -> Path:
    before, after = ({"step": step, "validation/reward_mean": 0.1 * step + seed} for step in (0, steps))
    of_steps = [rl_line(step, seed) for step in range(1, steps + 1)]
    return write(path, [{"warm_start/step": 1, "warm_start/loss": 2.0}, before, *of_steps, after])


def drawn(*paths: Path, smooth: int = 1):
    """The figure, and its panels by title."""
    problems: list[str] = []
    figure = plot.draw(plot.read_curves(list(paths), problems), smooth)
    assert problems == []
    return figure, {axes.get_title(loc="left"): axes for axes in figure.axes}


def line(axes, label: str) -> tuple[list, list]:
    """What a curve goes through: (steps, values)."""
    (found,) = [each for each in axes.get_lines() if each.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def expected(key: str, seeds=(0,)) -> tuple[list, list]:
    steps = list(range(1, STEPS + 1))
    return steps, pytest.approx([np.mean([rl_line(step, seed)[key] for seed in seeds]) for step in steps])


TITLES = {
    "mean reward": "reward/mean",
    "KL to the reference (nats per token)": "kl/ref",
    "entropy (nats per token)": "entropy",
    "response length (tokens)": "response/length_mean",
    "gradient norm": "grad_norm",
    "log-prob difference, trainer to server": "rollout/logprob_diff_mean",
}


def test_every_panel_has_the_numbers_of_the_run(tmp_path):
    figure, panels = drawn(rl_run(tmp_path / "a"))
    assert list(panels) == [*TITLES, "seconds per step"]
    for title, key in TITLES.items():
        assert line(panels[title], f"a {key}") == expected(key)
    held_out = panels["mean reward"].containers[0]
    assert held_out.get_label() == "a validation/reward_mean"
    assert held_out.lines[0].get_xydata().tolist() == [[0, 0], [STEPS, 0.1 * STEPS]]
    assert panels["log-prob difference, trainer to server"].get_yscale() == "linear"
    assert [text.get_text() for text in panels["mean reward"].get_legend().get_texts()] == ["training", "held out"]


def test_phases_are_stacked_to_the_seconds_of_the_step(tmp_path):
    _, panels = drawn(rl_run(tmp_path / "a"))
    axes = panels["seconds per step"]
    areas = {area.get_label(): area.get_paths()[0] for area in axes.collections}
    assert list(areas) == ["generate", "update", "other"]  # rewards took no time
    tops = {step: max(y for x, y in areas["other"].vertices if x == step) for step in range(1, STEPS + 1)}
    assert tops == {step: pytest.approx(rl_line(step)["time/step_s"]) for step in range(1, STEPS + 1)}
    assert areas["generate"].get_extents().height == pytest.approx(0.2)


def test_seeds_of_one_name_are_a_mean_and_a_band(tmp_path):
    runs = [rl_run(tmp_path / f"a-seed{seed}", seed, steps) for seed, steps in ((0, STEPS), (2, STEPS), (4, STEPS + 3))]
    _, panels = drawn(*runs)
    for title, key in TITLES.items():
        assert line(panels[title], f"a {key}") == expected(key, (0, 2, 4))  # the steps that all have
    band = panels["mean reward"].collections[0].get_paths()[0].vertices
    at_step_3 = [y for x, y in band if x == 3]
    assert [min(at_step_3), max(at_step_3)] == pytest.approx([0.3, 0.34])
    texts = [text.get_text() for text in panels["mean reward"].get_legend().get_texts()]
    assert texts == ["training, mean of 3 seeds", "lowest to highest seed", "held out"]


def test_runs_of_several_names_are_told_apart(tmp_path):
    sft = write(tmp_path / "c", [{"step": n, "sft/loss": 1 / n, "time/step_s": 0.5} for n in (1, 2)])
    figure, panels = drawn(rl_run(tmp_path / "a"), rl_run(tmp_path / "b", seed=3), sft)
    reward = panels["mean reward"]
    assert line(reward, "a reward/mean") == expected("reward/mean")
    assert line(reward, "b reward/mean") == expected("reward/mean", (3,))
    assert line(panels["loss"], "c sft/loss") == ([1, 2], [1.0, 0.5])
    colors = {text.get_label(): to_hex(text.get_color()) for text in figure.legends[0].get_lines()}
    assert list(colors) == ["a", "b", "c"] and len(set(colors.values())) == 3
    of_b = next(each for each in reward.get_lines() if each.get_label() == "b reward/mean")
    assert colors["b"] == to_hex(of_b.get_color())
    generating = next(bars for bars in panels["seconds per step, mean"].containers if bars.get_label() == "generate")
    assert [bar.get_width() for bar in generating] == pytest.approx([0.2, 0.5])
    assert len(panels) == len(TITLES) + 2


def test_what_a_run_does_not_have_is_not_drawn(tmp_path):
    lines = [{"step": n, "dpo/loss": 0.7, "dpo/accuracy": 0.5, "grad_norm": 1.0, "time/step_s": 1.0} for n in range(3)]
    _, panels = drawn(write(tmp_path / "a", lines))
    assert list(panels) == ["pairs in the right order", "loss", "gradient norm"]


def test_differences_that_span_more_than_a_decade_are_on_a_logarithmic_axis(tmp_path):
    lines = [rl_line(step) | {"rollout/logprob_diff_mean": 10.0**-step} for step in range(1, STEPS + 1)]
    _, panels = drawn(write(tmp_path / "a", lines))
    assert panels["log-prob difference, trainer to server"].get_yscale() == "log"


def test_smoothing_is_the_mean_of_the_last_steps_and_says_so(tmp_path):
    _, panels = drawn(rl_run(tmp_path / "a"), smooth=3)
    values = [rl_line(step)["entropy"] for step in range(1, STEPS + 1)]
    means = [np.mean(values[max(0, i - 2) : i + 1]) for i in range(STEPS)]
    assert line(panels["entropy (nats per token)"], "a entropy")[1] == pytest.approx(means)
    texts = [text.get_text() for text in panels["mean reward"].get_legend().get_texts()]
    assert texts == ["training, over the last 3 steps", "each step", "held out"]


def test_the_suffix_says_what_is_written(tmp_path, capsys):
    run = rl_run(tmp_path / "a")
    for suffix, begin in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        out = tmp_path / f"curves.{suffix}"
        assert cli.main(["plot", str(run), "--out", str(out), "--title", "some title"]) == 0
        assert out.read_bytes().startswith(begin)
    with Image.open(tmp_path / "curves.png") as image:
        assert image.width == plot.WIDTH * plot.DPI
    assert capsys.readouterr().out.splitlines()[-1] == f"megarl: {out}: a"


def test_what_is_wrong_is_told_all_at_once(tmp_path, capsys):
    empty, good = tmp_path / "empty", rl_run(tmp_path / "good")
    empty.mkdir()
    only_validation = write(tmp_path / "begun", [{"step": 0, "validation/reward_mean": 0.1}])
    broken = write(tmp_path / "broken", [rl_line(1)])
    (broken / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    runs = [str(path) for path in (empty, good, good, only_validation, broken, tmp_path / "none")]
    assert cli.main(["plot", *runs, "--out", str(tmp_path / "none/curves.gif"), "--smooth", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "megarl: error: 8 problems:",
        f"--out {tmp_path}/none/curves.gif: the suffix says what it is to be; valid: .png, .svg, .pdf",
        f"--out {tmp_path}/none/curves.gif: no such folder: {tmp_path}/none",
        "--smooth 0: wanted 1 or more steps",
        f"{empty}: no metrics.jsonl in it",
        f"{good} is given twice",
        f"{only_validation}/metrics.jsonl: no step in it yet",
        f"{broken}/metrics.jsonl:2: not valid JSON",
        f"{tmp_path}/none: no such run directory",
    ]


def test_seeds_without_a_common_step_are_refused(tmp_path):
    runs = [write(tmp_path / f"a-seed{step}", [rl_line(step)]) for step in (1, 2)]
    problems = []
    plot.read_curves(runs, problems)
    assert problems == ["a-seed1, a-seed2: seeds of one name without a step that all of them have"]


def test_a_last_line_that_is_being_written_is_left_out(tmp_path):
    run = rl_run(tmp_path / "a")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "reward/mean": 0.')
    assert plot.read_lines(run)[-1] == {"step": STEPS, "validation/reward_mean": 0.1 * STEPS}
    with pytest.raises(ConfigError, match="no such run directory"):
        plot.read_lines(tmp_path / "b")
