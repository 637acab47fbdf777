"""Serve two exported models behind one address, for canary roll-outs: `python -m megarl.rollout.serve_ab`.

    launch/serve_ab.sh MODEL_A MODEL_B --weight-b 0.1 --port 30000 --log ab.jsonl [-- SGLang's options for both]

All paths of SGLang's API are passed on, to model B with the given weight; the header X-Megarl-Arm of an answer says who
gave it, GET /ab/status counts. Ctrl-C or SIGTERM ends both servers.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from aiohttp import web

from megarl.errors import ConfigError, RunError
from megarl.machine import sees_gpu, visible_gpus
from megarl.rollout.ab_proxy import ABProxy, Arm
from megarl.rollout.server import Server, free_port, model_context_length
from megarl.rollout.server_args import check_server_args

ARMS = ("a", "b")
SHUTDOWN_S = 5.0  # for running requests at the end


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 ended by a signal while it served, 1 a server did not start, 2 wrong arguments, 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(parse(sys.argv[1:] if arguments is None else arguments))
        return 0
    except (ConfigError, RunError) as error:
        print(f"serve_ab: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("serve_ab: interrupted", file=sys.stderr)
        return 130


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options, with `server_args` and the bound socket `listener`. Raises ConfigError with all that is wrong."""
    parser = argparse.ArgumentParser(
        prog="serve_ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model_a", metavar="MODEL_A", help="Hugging Face folder")
    parser.add_argument("model_b", metavar="MODEL_B", help="Hugging Face folder of the candidate")
    parser.add_argument("--weight-b", type=float, default=0.1, help="share of the requests for B (default 0.1)")
    parser.add_argument("--seed", type=int, default=1, help="of the split")
    parser.add_argument("--sticky", action="store_true", help="split by user, so that each meets one model")
    header_help = "names the user, for --sticky (default X-User); without it the JSON's `user` does"
    parser.add_argument("--user-header", default="X-User", help=header_help)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--log", type=Path, default=Path("ab.jsonl"), help="gets a line per request (default ab.jsonl)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--gpus-a", metavar="0,1", help="default: the first ones that are visible")
    parser.add_argument("--gpus-b", metavar="2,3", help="default: the next ones")
    parser.add_argument("--start-timeout-s", type=float, default=600.0, help="for a server to be ready (default 600)")
    parser.add_argument("--request-timeout-s", type=float, default=600.0, help="for a piece of an answer (default 600)")
    own, rest = arguments, []
    if "--" in arguments:
        own, rest = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.device == "auto":
        options.device = "cuda" if sees_gpu() else "cpu"
    options.dtype = options.dtype or {"cpu": "float32", "cuda": "bfloat16"}[options.device]
    errors = [*check_models(options), *check_numbers(options), *check_gpus(options), *read_server_args(options, rest)]
    errors += [*check_files(options), *bind(options)]  # last, as it takes the port
    if errors:
        raise ConfigError("\n".join(errors))
    return options


def check_models(options: argparse.Namespace) -> Iterator[str]:
    for name, path in (("MODEL_A", options.model_a), ("MODEL_B", options.model_b)):
        if not Path(path).is_dir():
            yield f"{name}: {path} is no folder"
            continue
        try:
            model_context_length(path)
        except ConfigError as error:
            yield f"{name}: {error}"
        if not any(file.suffix in (".safetensors", ".bin") for file in Path(path).iterdir()):
            yield f"{name}: no *.safetensors and no *.bin in {path}"


def check_numbers(options: argparse.Namespace) -> Iterator[str]:
    if not 0 <= options.weight_b <= 1:
        yield f"--weight-b: given {options.weight_b:g}, allowed: 0 to 1"
    for name in ("tensor_parallel", "start_timeout_s", "request_timeout_s"):
        if not getattr(options, name) > 0:
            yield f"--{name.replace('_', '-')}: given {getattr(options, name):g}, allowed: above 0"


def check_gpus(options: argparse.Namespace) -> Iterator[str]:
    """Sets `gpus_a` and `gpus_b` to lists, empty on a CPU."""
    given = {"--gpus-a": options.gpus_a, "--gpus-b": options.gpus_b}
    options.gpus_a = options.gpus_b = []
    if options.device == "cpu":
        yield from (f"{flag}: given {gpus}, but the device is cpu" for flag, gpus in given.items() if gpus)
        return
    visible = visible_gpus()
    chosen = {flag: gpus.split(",") for flag, gpus in given.items() if gpus}
    free = [gpu for gpu in visible if not any(gpu in gpus for gpus in chosen.values())]
    for flag in given:
        if flag not in chosen:
            chosen[flag], free = free[: options.tensor_parallel], free[options.tensor_parallel :]
        if len(chosen[flag]) != options.tensor_parallel:
            has = f"has {len(chosen[flag])} of the visible GPUs ({', '.join(visible) or 'none'})"
            yield f"{flag}: the arm {has}, --tensor-parallel is {options.tensor_parallel}"
        if unknown := [gpu for gpu in chosen[flag] if gpu not in visible]:
            yield f"{flag}: {', '.join(unknown)} not among the visible GPUs ({', '.join(visible) or 'none'})"
    if both := set(chosen["--gpus-a"]) & set(chosen["--gpus-b"]):
        yield f"--gpus-b: {', '.join(sorted(both))} is in --gpus-a too; each server needs GPUs of its own"
    options.gpus_a, options.gpus_b = chosen["--gpus-a"], chosen["--gpus-b"]


def read_server_args(options: argparse.Namespace, words: list[str]) -> Iterator[str]:
    """Sets `server_args`: --a-b 1 --c --d=x -> {"a_b": "1", "c": True, "d": "x"}."""
    values: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            values[key] = [value] if equals else []
        elif values:
            values[key].append(word)
        else:
            yield f"after --: {word!r} is no option of SGLang's"
    options.server_args = {key: (v if len(v) > 1 else v[0]) if v else True for key, v in values.items()}
    for key, text in check_server_args(options.server_args):
        # What a config would have to set instead is no help here.
        yield f"after --: --{key.replace('_', '-')}: {text.partition(': set')[0]}"


def check_files(options: argparse.Namespace) -> Iterator[str]:
    try:
        with open(options.log, "a"):
            pass
    except OSError as error:
        yield f"--log: {options.log} cannot be written: {error.strerror}"


def bind(options: argparse.Namespace) -> Iterator[str]:
    """Sets `listener`: the port is ours from now on, and refuses connections until both models are ready."""
    options.listener = socket.socket()
    options.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        options.listener.bind((options.host, options.port))
    except (OSError, OverflowError) as error:
        options.listener.close()
        yield f"--port: {options.host}:{options.port} cannot be used: {getattr(error, 'strerror', None) or error}"


def run(options: argparse.Namespace) -> None:
    """Start both servers, serve until a signal comes, and end them."""
    models = dict(zip(ARMS, (options.model_a, options.model_b)))
    gpus = dict(zip(ARMS, (options.gpus_a, options.gpus_b)))
    servers = {name: make_server(options, name, model) for name, model in models.items()}
    try:
        for name, server in servers.items():
            print(f"arm {name}: {models[name]} starts on {server.url}, log {server.log_path}", flush=True)
            with visible_to_children(gpus[name]):
                server.start()
        for server in servers.values():
            server.wait_ready()
        arm_a, arm_b = (Arm(name, models[name], server.url, server.death_report) for name, server in servers.items())
        header = options.user_header if options.sticky else None
        proxy = ABProxy(arm_a, arm_b, options.weight_b, options.log, options.seed, header, options.request_timeout_s)
        asyncio.run(serve(proxy, options))
    finally:
        options.listener.close()
        with concurrent.futures.ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers.values()))


def make_server(options: argparse.Namespace, name: str, model: str) -> Server:
    log = options.log.with_suffix(f".{name}.log")
    port = free_port("127.0.0.1")
    arguments = (options.dtype, options.device, options.tensor_parallel, port, options.server_args, log)
    return Server(model, *arguments, start_timeout_s=options.start_timeout_s, section=f"arm_{name}")


@contextlib.contextmanager
def visible_to_children(gpus: list[str]) -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


async def serve(proxy: ABProxy, options: argparse.Namespace) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    application = proxy.application()
    # With handler_cancellation a client that leaves ends its request at the server too.
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.SockSite(runner, options.listener).start()
        share = f"{1 - options.weight_b:.3g} to arm a, {options.weight_b:.3g} to arm b"
        host, port = options.listener.getsockname()
        print(f"http://{host}:{port} is ready: {share}, log {options.log}", flush=True)
        await stop.wait()
        print("serve_ab: ends", flush=True)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
