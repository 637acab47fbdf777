"""The options of `megarl eval`, with or without a config file, as a config per model; and what is wrong with them."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl import config_file
from megarl.config import Config
from megarl.config_checks import model_shape, violations
from megarl.config_data import SourceConfig
from megarl.config_errors import covers, validate
from megarl.config_file import Document, Origin
from megarl.data.columns import USUAL_NAMES, find_columns
from megarl.errors import ConfigError
from megarl.evaluation import models
from megarl.evaluation.models import Model
from megarl.presets import with_preset

FLAGS = {  # option -> the key of the config that it sets
    "data": "data.validation",
    "reward": "algorithm.reward",
    "prompt_key": "data.prompt_key",
    "answer_key": "data.answer_key",
    "samples_per_prompt": "evaluation.samples_per_prompt",
    "temperature": "evaluation.temperature",
    "pass_at": "evaluation.pass_at",
    "max_new_tokens": "evaluation.max_new_tokens",
    "dtype": "model.dtype",
    "seed": "seed",
}
ONLY_TRAINING = ("placement", "warm_start", "sync", "trainer", "checkpoint", "guards", "monitor", "debug")  # sections
REWARD_ROLES = ("reward_model", "reward_server")
LIMIT = "rollout.sampling.max_new_tokens"  # which evaluation.max_new_tokens stands in for


def read_options(options: argparse.Namespace) -> tuple[dict[Model, Config], Path]:
    """(each model with the config that it is evaluated by, the output folder). Raises ConfigError with all that is
    wrong."""
    document, has_config = read_document(options)
    problems = document.problems
    found = read_models(options.models or [], problems)
    if not has_config:
        add_what_a_config_has(document, options, found)
    keep_what_is_evaluated(document)
    config = validate(Config, document)
    if has_config and not options.models and not document.doubtful & {"run_directory", "name"}:
        found = read_run(config, problems)
    out = Path(options.out or Path(config.run_directory) / "eval" / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    problems += [
        f"--out {out}: {folder} exists already; an evaluation never overwrites"
        for folder in (out, partial_of(out))
        if folder.exists()
    ]
    if options.max_prompts is not None and options.max_prompts < 1:
        problems.append(f"--max-prompts {options.max_prompts}: wanted 1 or more")
    configs = {}
    for model in found:
        document.origins["model.path"] = Origin(f"--model {model.name}={model.place}", model.place)
        configs[model] = config_of(model, config, document, has_config)
        problems += [line for line in lines_of(configs[model], document, model) if line not in problems]
    if not found:
        document.doubtful.add("model.path")
        problems += lines_of(config, document)
    if problems:
        header = [f"{len(problems)} problems:"] if len(problems) > 1 else []
        raise ConfigError("\n".join(header + problems))
    return configs, out


def partial_of(out: Path) -> Path:
    """Where an evaluation writes until it is done."""
    return out.with_name(out.name + ".partial")


def read_document(options: argparse.Namespace) -> tuple[Document, bool]:
    """(what the config file, the overrides and the options say, whether there is a config file)."""
    flags = {option: getattr(options, option) for option in FLAGS if getattr(options, option) is not None}
    as_overrides = [f"{FLAGS[option]}={json.dumps(value)}" for option, value in flags.items()]
    arguments = options.overrides
    has_config = bool(arguments) and ("=" not in arguments[0] or os.path.isfile(arguments[0]))
    if has_config:
        document = config_file.read(arguments[0], arguments[1:] + as_overrides)
        document.tree.setdefault("name", Path(arguments[0]).stem)
    else:
        document, seen = Document("megarl eval"), {}
        for override in arguments + as_overrides:
            config_file.apply_override(override, document, seen)
    for option, value in flags.items():
        given = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        document.origins[FLAGS[option]] = Origin(f"--{option.replace('_', '-')} {given}", given)
    if limit := document.origins.get("evaluation.max_new_tokens"):
        document.origins[LIMIT] = limit
    return document, has_config


def read_models(given: list[str], problems: list[str]) -> list[Model]:
    found: list[Model] = []
    for text in given:
        try:
            model = models.parse(text)
        except ConfigError as error:
            problems.append(f"--model {text}: {error}")
            continue
        if model.name in [other.name for other in found]:
            problems.append(f"--model {text}: a model before it is named {model.name} too; NAME=PATH gives it a name")
        found.append(model)
    return found


def read_run(config: Config, problems: list[str]) -> list[Model]:
    """The model that the config's own run has trained."""
    try:
        return [models.parse(str(config.run_path))]
    except ConfigError as error:
        problems.append(f"the run of this config is {config.run_path}: {error}; --model PATH names another model")
        return []


def add_what_a_config_has(document: Document, options: argparse.Namespace, found: list[Model]) -> None:
    """Where there is no config file: the keys that every config needs, from the options."""
    for option, key in (("models", "model"), ("data", "data"), ("reward", "algorithm.reward")):
        if not getattr(options, option):
            document.doubtful.add(key)
            document.problems.append(f"--{option.rstrip('s')} is missing: it is needed where no config is given")
    tree = document.tree
    set_default(tree, "name", "eval")
    set_default(tree, "model.path", str(found[0].folder) if found else "")
    set_default(tree, "data.train", options.data or "")
    if options.data and os.path.isfile(options.data):
        keys = dict.fromkeys(USUAL_NAMES) | {"prompt": options.prompt_key, "answer": options.answer_key}
        try:
            columns = find_columns(SourceConfig(path=options.data), keys)
        except ConfigError as error:
            document.problems.append(f"--data {error}")
            return
        set_default(tree, "data.prompt_key", columns.prompt)
        set_default(tree, "data.answer_key", columns.answer)


def set_default(tree: dict, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    section = tree.setdefault(section, {}) if section else tree
    if isinstance(section, dict):  # anything else is refused as such
        section.setdefault(name, value)


def keep_what_is_evaluated(document: Document) -> None:
    """Leave out what only a training reads: it need not fit this machine, and a supervised one has no servers."""
    tree = document.tree
    for section in ONLY_TRAINING:
        tree.pop(section, None)
    if isinstance(tree.get("rollout"), dict):
        tree["rollout"] = {key: value for key, value in tree["rollout"].items() if key not in ("save", "replay")}
    if isinstance(tree.get("roles"), dict):
        tree["roles"] = {role: value for role, value in tree["roles"].items() if role in REWARD_ROLES}
    document.doubtful.add("data.train")  # it need not be there
    data = tree.get("data")
    if isinstance(data, dict) and data.get("validation") is None and "data" not in document.doubtful:
        document.problems.append(document.line("null, and no --data FILE is given", "data.validation"))
    algorithm = tree.get("algorithm") or {}
    if isinstance(algorithm, dict):
        rewards = {key: value for key, value in with_preset(algorithm).items() if key == "reward"}
        tree["algorithm"] = rewards
        if "reward" in rewards and rewards["reward"] is None:
            document.doubtful.add("algorithm.reward")
            of_preset = f" with algorithm.name: {algorithm['name']}" if "name" in algorithm else ""
            text = f"null{of_preset}, and no --reward NAME is given"
            document.problems.append(document.line(text, "algorithm.reward", "algorithm.name"))


def config_of(model: Model, config: Config, document: Document, has_config: bool) -> Config:
    """The config that a model is evaluated by, as if it was the model of a run. Without a config file the weights'
    dtype is the model's own, and prompts may fill its context."""
    data, sampling, changed = config.data, config.rollout.sampling, {"path": str(model.folder)}
    if limit := config.evaluation.max_new_tokens:
        sampling = sampling.model_copy(update={"max_new_tokens": limit})
    if not has_config and "model.dtype" not in document.origins:
        try:
            changed["dtype"] = model.dtype()
        except ConfigError as error:
            document.problems.append(f"--model {model.name}={model.place}: {error}")
    if not has_config and "data.max_prompt_tokens" not in document.origins:
        with suppress(ValueError):  # which the checks tell
            room = model_shape(config, str(model.folder)).max_positions - sampling.max_new_tokens
            data = data.model_copy(update={"max_prompt_tokens": max(room, 1)})
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=changed),
            "data": data,
            "rollout": config.rollout.model_copy(update={"sampling": sampling}),
        }
    )


def lines_of(config: Config, document: Document, model: Model | None = None) -> Iterator[str]:
    """What the checks find in the config of a model, or in one without a model."""
    for violation in violations(config):
        if any(covers(document.doubtful, key) for key in violation.keys):
            continue
        # The weights of a checkpoint lie beside its hf/.
        if model and model.role_folder and violation.text.startswith("no *.safetensors"):
            continue
        yield document.line(violation.text, *violation.keys)
