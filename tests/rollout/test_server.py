"""The supervision of SGLang servers: refused options, failed starts, and that no process is ever left."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from megarl.errors import ConfigError, RunError
from megarl.rollout.launch import living_members
from megarl.rollout.server import Server, free_port
from megarl.rollout.server_args import check_server_args, to_flags

START_S = 120
GONE_S = 10  # the kernel's work; a child that only finds out by itself needs longer, it is still importing SGLang


def make_server(model_folder, tmp_path, port=None, **server_args):
    return Server(str(model_folder), "float32", "cpu", 1, port, server_args, tmp_path / "server.log", 300)


def wait_until(condition, what, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def assert_nothing_left(server):
    assert living_members(server._process.pid) == []
    assert not server.alive()
    assert "ended with" in server.death_report()
    server.stop()


def test_unknown_and_reserved_options_are_refused_with_a_hint():
    good = {"mem_fraction_static": 0.8, "cuda_graph_bs": [1, 8], "disable_radix_cache": True, "lora_paths": None}
    assert check_server_args(good) == []
    assert check_server_args({"mem_fraction_statik": 0.8, "tensor_parallel_size": 2, "load_format": {"a": 1}}) == [
        ("mem_fraction_statik", "SGLang has no such option: did you mean mem_fraction_static?"),
        ("tensor_parallel_size", "not allowed here: set rollout.tensor_parallel"),
        ("load_format", "{'a': 1} must be a string, a number, a boolean, null or a list; JSON as a string"),
    ]


def test_options_are_checked_without_heavy_imports():
    code = (
        "import sys; from megarl.rollout.server_args import check_server_args; check_server_args({'port': 1});"
        "print([m for m in ('torch', 'sglang', 'ray', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr


def test_options_become_flags():
    options = {"a_b": 1, "c": True, "d": False, "e": None, "f": [1, 8], "g": "x y", "h": -1}
    assert to_flags(options) == ["--a-b=1", "--c", "--f", "1", "8", "--g=x y", "--h=-1"]


def test_a_wrong_option_or_a_missing_model_is_refused_before_anything_starts(model_folder, tmp_path):
    with pytest.raises(ConfigError, match="rollout.server_args.prot: SGLang has no such option"):
        make_server(model_folder, tmp_path, prot=1)
    with pytest.raises(ConfigError, match="model.path: cannot read .*config.json: No such file"):
        make_server(tmp_path / "nowhere", tmp_path).start()


def test_a_given_port_in_use_is_refused_at_once(model_folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RunError, match=f"rollout.ports: port {port} is in use"):
            make_server(model_folder, tmp_path, port=port).start()


@pytest.mark.soak
def test_an_option_value_that_sglang_refuses_is_shown_and_leaves_no_process(model_folder, tmp_path):
    server = make_server(model_folder, tmp_path, attention_backend="nonsense")
    server.start()
    with pytest.raises(RunError, match=r"(?s)did not start: exit code 2; log .*server.log.*invalid choice: 'nonsense'"):
        server.wait_ready()
    assert_nothing_left(server)


@pytest.mark.soak
def test_a_crash_of_sglangs_own_child_is_shown_and_leaves_no_process(model_folder, tmp_path):
    shutil.copytree(model_folder, tmp_path / "hollow", ignore=shutil.ignore_patterns("*.safetensors"))
    server = make_server(tmp_path / "hollow", tmp_path)
    server.start()
    with pytest.raises(RunError, match=r"(?s)did not start: .*Cannot find any model weights"):
        server.wait_ready()
    assert_nothing_left(server)


def test_a_late_server_is_stopped_with_its_log_in_the_error(model_folder, tmp_path):
    server = Server(str(model_folder), "float32", "cpu", 1, None, {}, tmp_path / "server.log", start_timeout_s=0.5)
    server.start()
    with pytest.raises(RunError, match=r"not ready within rollout.start_timeout_s=0.5 s; log .*server.log"):
        server.wait_ready()
    assert living_members(server._process.pid) == []


def test_no_process_outlives_a_supervisor_that_is_killed_during_the_start(model_folder, tmp_path):
    """Killed at the worst moment: SGLang's own children exist and have not yet asked to die with their parent."""
    supervisor, session = start_supervisor(model_folder, tmp_path, "")
    wait_until(lambda: len(living_members(session)) >= 4, "SGLang's children", START_S)
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    wait_until(lambda: not living_members(session), "the end of all server processes", GONE_S)


@pytest.mark.soak
def test_no_process_outlives_a_supervisor_that_is_killed_in_service(model_folder, tmp_path):
    supervisor, session = start_supervisor(model_folder, tmp_path, "server.wait_ready(); print('ready', flush=True);")
    assert supervisor.stdout.readline() == "ready\n"
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    wait_until(lambda: not living_members(session), "the end of all server processes", GONE_S)


@pytest.mark.soak
def test_a_port_taken_meanwhile_is_replaced_and_a_killed_scheduler_ends_the_server(model_folder, tmp_path):
    server = make_server(model_folder, tmp_path)
    server.start()
    try:
        with socket.create_server(("127.0.0.1", server.port)):
            taken = server.port
            server.wait_ready()
        assert server.port != taken
        session = server._process.pid
        scheduler = next(pid for pid in living_members(session) if "scheduler" in command_line(pid))
        os.kill(scheduler, signal.SIGKILL)
        wait_until(lambda: not server.alive(), "the end of a server without scheduler", START_S)
        assert "ended with" in server.death_report()
    finally:
        server.stop()
    assert living_members(session) == []
    server.stop()


def start_supervisor(model_folder, tmp_path, then):
    """A process of its own that starts a server, prints the server's session, does `then`, and waits."""
    code = (
        "import time; from megarl.rollout.server import Server;"
        f"server = Server({str(model_folder)!r}, 'float32', 'cpu', 1, None, {{}}, {str(tmp_path / 'log')!r}, 300);"
        f"server.start(); print(server._process.pid, flush=True); {then} time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    return supervisor, int(supervisor.stdout.readline())


def command_line(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def test_the_child_ends_if_its_parent_is_already_gone():
    command = [sys.executable, "-m", "megarl.rollout.launch", "1", "--", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "parent 1 is gone" in result.stderr


def test_a_free_port_can_be_bound():
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))):
        pass
