"""What `rollout.server_args` may hold: SGLang's own option names, read from its source without importing it."""

import ast
import difflib
import functools
import importlib.util
from pathlib import Path

# Options that megarl sets itself, or whose other values break its weight updates, and what to set instead.
RESERVED = {
    "model_path": "set model.path",
    "tokenizer_path": "set model.path",
    "dtype": "set model.dtype",
    "device": "set device",
    "tp_size": "set rollout.tensor_parallel",
    "pp_size": "a weight group counts tensor-parallel ranks only",
    "dp_size": "set rollout.servers",
    "context_length": "it is the model's max_position_embeddings",
    "host": "megarl chooses the address",
    "port": "set rollout.ports",
    "served_model_name": "megarl uses it to tell its servers apart",
    "weight_version": "megarl counts it",
    "base_gpu_id": "megarl chooses the GPUs",
    "enable_memory_saver": "set placement: colocated",
    "custom_weight_loader": "megarl receives weights through its own",
    "skip_tokenizer_init": "megarl chooses it",
    "is_embedding": "set roles.reward_server",
    "api_key": "the client sends none",
    "admin_api_key": "the client sends none",
    "config": "write its options here",
}


def check_server_args(server_args: dict) -> list[tuple[str, str]]:
    """(option, what is wrong) for each option that SGLang does not know, that megarl reserves, or whose value has no form
    on a command line.

    Takes about 0.2 s the first time: it parses SGLang's source, importing it would take half a minute.
    """
    if not server_args:
        return []
    options = sglang_options()
    if options is None:
        return [(key, "sglang is not installed, its options cannot be checked") for key in server_args]
    errors = []
    for key, value in server_args.items():
        option = options.get(key)
        if option is None:
            near = difflib.get_close_matches(key, options, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            errors.append((key, f"SGLang has no such option{hint}"))
        elif option in RESERVED:
            errors.append((key, f"not allowed here: {RESERVED[option]}"))
        elif not _has_flag_form(value):
            errors.append((key, f"{value!r} must be a string, a number, a boolean, null or a list; JSON as a string"))
    return errors


def to_flags(server_args: dict) -> list[str]:
    """{"a_b": 1} -> ["--a-b=1"]; True -> bare flag; False and None -> nothing; a list -> the flag and its values."""
    flags = []
    for key, value in server_args.items():
        flag = "--" + key.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not None and value is not False:
            flags.append(f"{flag}={value}")  # one word, so that a value may begin with a dash
    return flags


@functools.cache
def sglang_options() -> dict[str, str] | None:
    """{name or alias: field} of SGLang's ServerArgs, in snake_case; None if SGLang is not installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None:
        return None
    path = Path(spec.submodule_search_locations[0]) / "srt" / "server_args.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    server_args = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs")
    options = {}
    for node in server_args.body:
        if isinstance(node, ast.AnnAssign) and not _has_no_option(node.annotation):  # field: A[type, Arg(...)]
            options[node.target.id] = node.target.id
            options |= dict.fromkeys(_option_names(node.annotation), node.target.id)
        elif isinstance(node, ast.FunctionDef) and node.name == "add_cli_args":  # deprecated names and a few more
            options |= {name: options.get(name, name) for name in _option_names(node)}
    return options


def _option_names(node: ast.AST) -> list[str]:
    """The strings "--like-this" below a node, as like_this."""
    strings = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [s[2:].replace("-", "_") for s in strings if s.startswith("--") and s[2:].replace("-", "").isalnum()]


def _has_no_option(annotation: ast.AST) -> bool:
    return any(isinstance(node, ast.keyword) and node.arg == "no_cli" for node in ast.walk(annotation))


def _has_flag_form(value) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value)
    return value is None or isinstance(value, str | int | float)
