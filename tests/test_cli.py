"""The command line: exit codes, where messages go, and that errors need no heavy import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megarl
from megarl import cli
from megarl.errors import RunError

ROOT = Path(__file__).parents[1]
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
HEAVY = ("torch", "ray", "transformers", "numpy", "sglang", "megatron", "tensorboard", "wandb", "prometheus_client")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Without earlier runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_dry_run_prints_the_resolved_config(capsys):
    assert cli.main(["train", QUICKSTART, "trainer.steps=7", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "steps: 7" in out
    assert "# samples per step" in out
    assert err == ""


def test_the_name_of_an_earlier_run_is_refused_in_a_dry_run_too(folder, capsys):
    (folder / "runs/used").mkdir(parents=True)
    (folder / "runs/used/metrics.jsonl").write_text("{}\n")
    for more in ([], ["--dry-run"]):
        assert cli.main(["train", QUICKSTART, "name=used", *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(
            "megarl: error: name: runs/used holds an earlier run; go on with it (--resume auto), "
        )


def test_overrides_may_stand_on_both_sides_of_an_option(capsys):
    assert cli.main(["train", QUICKSTART, "trainer.steps=7", "--dry-run", "seed=5"]) == 0
    assert cli.main(["train", "--dry-run", QUICKSTART, "trainer.steps=7", "seed=5"]) == 0
    first, second = capsys.readouterr().out.split("name: quickstart")[1:]
    assert first == second
    assert "seed: 5" in first


def test_a_config_error_goes_to_stderr_with_code_2(capsys):
    assert cli.main(["train", QUICKSTART, "rollout.temprature=0.7", "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "megarl: error: override rollout.temprature=0.7: unknown key; did you mean rollout.sampling.temperature?\n"
    )


def test_a_missing_config_file_has_code_2(capsys):
    assert cli.main(["train", "none.yaml"]) == 2
    assert capsys.readouterr().err.startswith("megarl: error: none.yaml: cannot read the config file")


def test_a_word_that_is_no_override_is_refused_with_code_2(capsys):
    assert cli.main(["train", QUICKSTART, "--dry-run", "fast"]) == 2
    assert capsys.readouterr().err == "megarl: error: override fast: key.path=value is expected\n"


WRONG = [[], ["fly"], ["train"], ["train", QUICKSTART, "--dry"], ["train", "x", "-x"], ["clean", "--ray"]]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage: megarl" in capsys.readouterr().err


def test_run_ids_to_clean_may_stand_on_both_sides_of_an_option():
    for arguments in (["a", "b", "--dry-run"], ["--dry-run", "a", "b"], ["a", "--ray-address", "r", "b"]):
        assert cli.parse(["clean", *arguments]).run_ids == ["a", "b"]
    assert cli.parse(["clean"]).run_ids == []


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"


@pytest.mark.parametrize(
    "error, code, message",
    [(RunError("server 0 died"), 1, "server 0 died"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_a_failed_or_interrupted_run_is_one_line_and_a_code(error, code, message, monkeypatch, capsys):
    def fail(options, command):
        raise error

    monkeypatch.setattr(cli, "train", fail)
    assert cli.main(["train", QUICKSTART]) == code
    assert capsys.readouterr().err == f"megarl: error: {message}\n"


def test_the_run_gets_the_config_the_command_and_no_gpu(monkeypatch):
    """In a process of its own, with a trainer that only reports what it was given."""
    code = (
        "import os, sys, types\n"
        "trainer = types.ModuleType('megarl.trainer')\n"
        "gpus = lambda: repr(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "trainer.train = lambda config, command, resume: print(config.name, command[2:], gpus(), resume)\n"
        "sys.modules['megarl.trainer'] = trainer\n"
        "from megarl.cli import main\n"
        "sys.exit(main(['train', sys.argv[1], 'seed=3']))"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = run("-c", code, QUICKSTART)
    assert result.stdout == f"quickstart ['{QUICKSTART}', 'seed=3'] '' None\n", result.stderr


def test_checking_a_config_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from megarl.cli import main\n"
        "codes = [main(['train', sys.argv[1], '--dry-run', *more]) for more in ([], ['sed=1'])]\n"
        f"print('LOADED', codes, sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    assert run("-c", code, QUICKSTART).stdout.splitlines()[-1] == "LOADED [0, 2] []"


def test_the_module_runs_as_a_program():
    result = run("-m", "megarl", "train", "none.yaml")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "megarl: error: none.yaml: cannot read the config file: No such file or directory\n"


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60)
