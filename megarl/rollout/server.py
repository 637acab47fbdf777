"""One SGLang server: its command line, its environment, its life and its death.

`start` and `wait_ready` are apart so that several servers and the trainer can start at the same time. A server never
outlives its supervisor (launch.py) and never speaks for another one (`_answers`).
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from megarl.errors import ConfigError, RunError
from megarl.logs import log_excerpt
from megarl.machine import interface_of
from megarl.rollout.launch import KILL_S, TERMINATE_S, living_members
from megarl.rollout.server_args import check_server_args, to_flags

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
CPU_OPS = Path(__file__).resolve().parent / "sglang_cpu_ops"
WEIGHT_RECEIVER = "megarl.rollout.receiver.receive"  # called in each of a server's ranks
NEVER_PUSHED = -1  # the weight version of a server that still has the weights of its model folder
MAX_ANSWER = 500  # bytes of a server's answer in an error
PORT_ATTEMPTS = 3  # with ports of our own choice
POLL_S = 0.5
FREEZE_S = 30.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the site does not know our servers
HEALTH_TIMEOUT_S = 25.0  # SGLang answers /health after one generated token, or 503 after 20 s

# Of the GPU, for weights and KV cache: something of the actor remains there.
COLOCATED_DEFAULTS = {"mem_fraction_static": 0.7}

# SGLang 0.5.17 takes prompts up to its context length - 7 and clips responses, in silence, at its context length - 2
# tokens in all. It is told a longer context, so that both limits are the model's own or lie outside: what is to be
# scored is all prompt.
CONTEXT_SLACK = 7

# Sequence classifiers that SGLang 0.5.17 serves, and whether its class has a bias. Of other families it would answer
# with hidden states in place of scores.
CLASSIFIERS = {
    "LlamaForSequenceClassification": False,
    "Qwen2ForSequenceClassification": True,
    "Qwen3ForSequenceClassification": True,
}

COMMON_DEFAULTS = {
    "skip_server_warmup": True,  # the first /health generates a token
    "log_level_http": "warning",  # no line per request
}
CPU_DEFAULTS = {
    **COMMON_DEFAULTS,
    "attention_backend": "torch_native",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # an idle server otherwise spins a core
    "max_total_tokens": 16384,
    "mem_fraction_static": 0.3,
}
CUDA_DEFAULTS = {
    **COMMON_DEFAULTS,
    "attention_backend": "triton",
    "disable_prefill_cuda_graph": True,  # over a minute of start-up for little: prefill is a small part of a rollout
}


class Server:
    """Supervises one SGLang server of `tensor_parallel` ranks on this machine.

    `port` None finds a free one, and another if it is taken in the meantime. `server_args` are SGLang's options in
    snake_case, over our defaults. The log receives all that the server's processes print. Call `start` from a thread
    that lives as long as the server.
    """

    def __init__(
        self,
        model_path: str,
        dtype: str,
        device: str,
        tensor_parallel: int,
        port: int | None,
        server_args: dict,
        log_path: str | Path,
        start_timeout_s: float,
        host: str = "127.0.0.1",
        shared_gpus: str | None = None,
        first_gpu: int = 0,
        section: str = "rollout",
        is_classifier: bool = False,
    ):
        """`section` of the config: for messages. `shared_gpus`: those that a colocated actor has too, as
        CUDA_VISIBLE_DEVICES, and all of them, since a rank of the server must see the GPU of whoever hands it weights;
        its own ranks are on those from place `first_gpu` on. `is_classifier`: it scores sequences."""
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"device: {device!r} is neither cpu nor cuda")
        if errors := check_server_args(server_args):
            raise ConfigError("\n".join(f"{section}.server_args.{key}: {text}" for key, text in errors))
        self.model_path = str(model_path)
        self.dtype = dtype
        self.device = device
        self.tensor_parallel = tensor_parallel
        self.given_port = port
        self.server_args = server_args
        self.log_path = Path(log_path)
        self.start_timeout_s = start_timeout_s
        self.host = host
        self.shared_gpus = shared_gpus
        self.first_gpu = first_gpu
        self.section = section
        self.is_classifier = is_classifier
        self.port: int | None = port
        self._name = ""
        self._process: subprocess.Popen | None = None
        self._log_start = 0
        self._deadline = 0.0
        self._spawned = 0

    @property
    def url(self) -> str:
        if self.port is None:
            raise RuntimeError("the server has no port before start()")
        return f"http://{self.host}:{self.port}"

    @property
    def gpus(self) -> list[str]:
        """Its ranks', as CUDA_VISIBLE_DEVICES names them."""
        if self.device == "cpu":
            return []
        visible = (self.shared_gpus or os.environ.get("CUDA_VISIBLE_DEVICES", "")).split(",")
        first = self.first_gpu if self.shared_gpus else 0
        return visible[first : first + self.tensor_parallel]

    @property
    def pids(self) -> list[int]:
        """Of all its processes; none before `start` and after its end."""
        return living_members(self._process.pid) if self.alive() else []

    def start(self) -> None:
        """Start the processes and return at once. Raises RunError if a given port is in use."""
        assert not self.alive(), "the server is already running"
        self._deadline = time.monotonic() + self.start_timeout_s
        self._spawned = 0
        self._spawn()

    def wait_ready(self) -> None:
        """Wait until the server has generated a token, at most `start_timeout_s` after `start`.

        Raises RunError with the end of the log if the server dies or is late; nothing of it is left then.
        """
        while not self._answers():
            code = self._process.poll()
            if code is not None and self._port_was_taken() and self._spawned < PORT_ATTEMPTS:
                self.stop()
                self._spawn()
            elif code is not None:
                self.stop()
                raise RunError(f"the SGLang server on {self.url} did not start: {exit_text(code)}; {self._log_text()}")
            elif time.monotonic() > self._deadline:
                self.stop()
                raise RunError(
                    f"the SGLang server on {self.url} was not ready within {self.section}.start_timeout_s="
                    f"{self.start_timeout_s:g} s; {self._log_text()}"
                )
            time.sleep(POLL_S)
        # Else all that was imported is walked whenever memory is given back: half a second for each turn of the GPUs.
        post(f"{self.url}/freeze_gc", {}, FREEZE_S, self.section)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def death_report(self, wait_s: float = 0.0) -> str | None:
        """Why the server is not alive, with the end of its log; None where it lives and does not end in `wait_s`."""
        deadline = time.monotonic() + wait_s
        while self.alive():
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)
        code = None if self._process is None else self._process.returncode
        state = "was not started" if code is None else f"ended with {exit_text(code)}"
        return f"the SGLang server on {self.host}:{self.port} {state}; {self._log_text()}"

    def stop(self) -> None:
        """End the server and wait until no process of it is left; may be called again."""
        if self._process is None:
            return
        self._process.terminate()  # the guardian (launch.py) ends all others
        try:
            self._process.wait(TERMINATE_S + 2 * KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel ends the others with it
            self._process.wait(KILL_S)
        if members := living_members(self._process.pid):
            raise RunError(f"processes {members} of an SGLang server survived SIGKILL for {KILL_S:g} s")

    def command(self) -> list[str]:
        defaults = CPU_DEFAULTS if self.device == "cpu" else CUDA_DEFAULTS
        fixed = {
            "model_path": self.model_path,
            "context_length": model_context_length(self.model_path) + CONTEXT_SLACK,
            "dtype": self.dtype,
            "device": self.device,
            "tp_size": self.tensor_parallel,
            "host": self.host,
            "port": self.port,
            "served_model_name": self._name,
            "weight_version": NEVER_PUSHED,
            "custom_weight_loader": [WEIGHT_RECEIVER],
            "is_embedding": self.is_classifier,
        }
        if self.shared_gpus:
            fixed |= {"base_gpu_id": self.first_gpu, "enable_memory_saver": True}
            defaults = defaults | COLOCATED_DEFAULTS
        launch = [sys.executable, "-m", "megarl.rollout.launch", str(os.getpid()), "--"]
        return launch + to_flags(fixed | defaults | self.server_args)

    def _spawn(self) -> None:
        self.port = self.given_port
        if self.port is None:
            self.port = free_port(self.host)
        elif not port_is_free(self.host, self.port):
            raise RunError(f"{self.section}.ports: port {self.port} is in use on {self.host}")
        self._name = f"megarl-{uuid.uuid4().hex}"
        self._spawned += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self.command(),
                env=environment(self.device, self.tensor_parallel, self.host, self.shared_gpus),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # no Ctrl-C of the terminal's, and all of the server's processes are found
            )

    def _answers(self) -> bool:
        """Whether our server, not another one that got the same port, generates tokens."""
        timeout_s = max(1.0, min(HEALTH_TIMEOUT_S, self._deadline - time.monotonic()))
        try:
            with DIRECT.open(f"{self.url}/health", timeout=timeout_s):
                pass
            with DIRECT.open(f"{self.url}/v1/models", timeout=timeout_s) as response:
                models = json.load(response)
        except (OSError, ValueError, http.client.HTTPException):
            return False  # refused, late, 503, no HTTP or no JSON: not ours or not yet
        return [model.get("id") for model in models.get("data", [])] == [self._name]

    def _log_since_start(self) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def _port_was_taken(self) -> bool:
        return self.given_port is None and "address already in use" in self._log_since_start().lower()

    def _log_text(self) -> str:
        return f"log {self.log_path}:\n{log_excerpt(self._log_since_start())}" if self.log_path.exists() else "no log"


def environment(device: str, tensor_parallel: int, host: str, shared_gpus: str | None = None) -> dict[str, str]:
    """The environment of a server's processes: ours, plus what stock SGLang 0.5.17 needs on this device."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # three processes import half a minute of modules
    python_path = [str(PACKAGE_ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "JOBLIB_MULTIPROCESSING": "0",  # some import brings it in, and its semaphores would outlive a killed server
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # CONTEXT_SLACK
        "SGLANG_KILLPG_ON_SCHEDULER_EXCEPTION": "1",  # a crash ends the whole server, now
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "1",  # else it lingers for a minute
    }
    if interface := interface_of(host):  # as in EngineWorker
        env.setdefault("GLOO_SOCKET_IFNAME", interface)
    if device == "cpu":
        python_path.insert(0, str(CPU_OPS))
        env |= {
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_ROPE_CACHE_FP32": "1",
            "OMP_NUM_THREADS": "1",
        }
        if tensor_parallel > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_NCCL_SO_PATH"] = "/nonexistent-libnccl.so"
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(tensor_parallel))
    else:
        # Both ends of a weight group must agree on CUMEM, and multicast stays off.
        env |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
        if shared_gpus:
            env["CUDA_VISIBLE_DEVICES"] = shared_gpus  # Ray hides them: it counts them as the actor's
    env["PYTHONPATH"] = os.pathsep.join(python_path)
    return env


def post(url: str, body: dict, timeout_s: float, where: str) -> None:
    """POST JSON from a process that has no client of its own. Raises RunError naming `where` and the URL."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with DIRECT.open(request, timeout=timeout_s):
            pass
    except urllib.error.HTTPError as error:
        answer = error.read(MAX_ANSWER).decode(errors="replace")
        raise RunError(f"{where}: {url}: HTTP {error.code}: {answer}") from error
    except (OSError, http.client.HTTPException) as error:
        raise RunError(f"{where}: {url}: no answer within {timeout_s:g} s, or no connection: {error}") from error


def model_context_length(model_path: str) -> int:
    """`max_position_embeddings` of a model folder. Raises ConfigError if there is none."""
    path = Path(model_path) / "config.json"
    try:
        return json.loads(path.read_text())["max_position_embeddings"]
    except OSError as error:
        raise ConfigError(f"model.path: cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path}: no max_position_embeddings ({type(error).__name__}: {error})") from error


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
