"""What the rewards allow: functions that exist, with options that they have, in sums that mean something."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from megarl.config_errors import nearest
from megarl.config_rewards import functions_of
from megarl.config_unread import Unread, unread
from megarl.config_violation import Violation, in_yaml, listed
from megarl.errors import ConfigError
from megarl.rewards import MODEL, REWARDS, find, options_model, takes_all

if TYPE_CHECKING:
    from megarl.config import Config
    from megarl.config_rewards import RewardConfig

IGNORES_REWARD = {  # advantages that do not read Sample.reward
    "gdpo": "gdpo reads the parts of a reward, not their sum",
    "distillation": "distillation learns from the teacher's log-probs alone",
}
# options that limit a call from within, the wider one first: beside a deadline a timeout is that of one attempt
OWN_LIMITS = ("deadline_s", "timeout_s")
ROLES = ("roles.reward_model", "roles.reward_server")  # what gives the reward `model`


def check_functions(config: "Config") -> Iterator[Violation]:
    functions = functions_of(config.algorithm.reward)
    for name, part in config.algorithm.reward.items():
        key = f"algorithm.reward.{name}"
        if "/" in name:
            yield Violation(f"given {name!r}, but metrics are named after it; valid: a name without '/'", (key,))
        if functions[name] == MODEL:
            if part.options:
                yield Violation(f"given {in_yaml(part.options)}, but {MODEL} has no options", (f"{key}.options",))
            continue
        try:
            function = find(functions[name])
            schema = options_model(function)
        except ConfigError as error:
            yield Violation(str(error), (key if part.function is None else f"{key}.function", "algorithm.reward"))
            continue
        yield from check_options(part, schema, f"{key}.options")
        yield from check_limit(config, part, function, f"{key}.options")


def check_options(part: "RewardConfig", schema: type[BaseModel], key: str) -> Iterator[Violation]:
    try:
        schema.model_validate(part.options)
    except ValidationError as error:
        details = error.errors(include_url=False)
    else:
        return
    known = list(schema.model_fields)
    for detail in details:
        path = ".".join(map(str, detail["loc"]))
        keys, name = (f"{key}.{path}", key), str(detail["loc"][0])
        if detail["type"] == "extra_forbidden" and name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near[0]}?" if near else f"valid: {listed(known) or 'it has none'}"
            yield Violation(f"unknown option; {hint}", keys)
        elif detail["type"] == "missing":
            yield Violation("missing, a required option", keys)
        else:
            reason = detail.get("ctx", {}).get("error") or detail["msg"]  # a ValueError of the reward's own says it all
            value = detail["input"]
            given = f"given {in_yaml(value)}" if name in part.options else f"its default is {value!r}"
            yield Violation(f"{given}: {reason}", keys)


def check_limit(config: "Config", part: "RewardConfig", function: Callable, key: str) -> Iterator[Violation]:
    """Where the pool's limit comes first, what a reward says at its own is never heard."""
    fields = options_model(function).model_fields
    own = next((name for name in OWN_LIMITS if name in fields), None)
    if own is None:
        return
    limit = "batch_timeout_s" if takes_all(function) else "timeout_s"
    given, most = part.options.get(own, fields[own].default), getattr(config.rewards, limit)
    if isinstance(given, int | float) and given >= most:  # other types are refused as such
        text = f"{given:g} s, but rewards.{limit} = {most:g} ends each call by then; valid: less, or more there"
        yield Violation(text, (f"{key}.{own}", f"rewards.{limit}", key))


def check_sum(config: "Config") -> Iterator[Violation]:
    algorithm, reward = config.algorithm, config.algorithm.reward
    keys, known = ("algorithm.reward", "algorithm.advantage"), listed(sorted([*REWARDS, MODEL]))
    if reward and not any(algorithm.reward_weights.values()):
        text = f"given {in_yaml(algorithm.reward_weights)}: no reward has a weight; valid: one of them not 0"
        yield Violation(text, ("algorithm.reward",))
    if algorithm.advantage == "gdpo" and len(reward) < 2:
        text = f"given {listed(reward) or 'null'}, but gdpo wants several rewards by name with their weights: "
        yield Violation(text + "{gsm8k: 1.0, completed: 0.1}", keys)
    elif not reward and algorithm.advantage != "distillation":
        text = f"given null, but algorithm.advantage: {algorithm.advantage} is made of rewards; valid: {known}, or "
        yield Violation(text + "pkg.module:function", keys)
    elif not reward and config.data.validation is not None:
        text = "given, but algorithm.reward is null, and a validation scores the responses to the held-out prompts; "
        text += f"valid: null, or algorithm.reward, which is then only logged: {known}"
        yield Violation(text, ("data.validation", *keys))
    for name, part in reward.items():
        if part.normalize != "none" and algorithm.advantage == "gdpo":
            text = f"given {part.normalize}, but gdpo normalizes each part in its group itself; valid: none"
            yield Violation(text, (f"algorithm.reward.{name}.normalize", *keys))
    if config.debug.shuffle_rewards and algorithm.advantage == "distillation":
        text = f"given true, but {IGNORES_REWARD['distillation']}; valid: false"
        yield Violation(text, ("debug.shuffle_rewards", "algorithm.advantage"))


def check_model(config: "Config") -> Iterator[Violation]:
    used = [name for name, function in functions_of(config.algorithm.reward).items() if function == MODEL]
    given = [role for role in ROLES if getattr(config.roles, role.removeprefix("roles.")) is not None]
    if used and len(given) != 1:
        text = f"the reward {MODEL} is given by a role, but {' and '.join(given) or 'none'} is there; give one of "
        yield Violation(text + f"{' and '.join(ROLES)}: {{path: FOLDER}}", (f"algorithm.reward.{used[0]}", *ROLES))
    if given and not used:
        text = f"given, but no reward is {MODEL}; valid: null, or algorithm.reward: {{{MODEL}: 1.0}}"
        yield Violation(text, (given[0], "algorithm.reward"))


def check_unread(config: "Config") -> Iterator[Violation]:
    reasons: Unread = {}
    if not config.algorithm.reward:
        reasons["rewards"] = ("algorithm.reward is null: there are no rewards", "algorithm.reward")
    if config.rewards.on_error == "fail":
        reasons["rewards.max_error_ratio"] = ("rewards.on_error is fail: none may fail", "rewards.on_error")
    if config.algorithm.advantage == "distillation":
        why = (IGNORES_REWARD["distillation"], "algorithm.advantage")
        reasons["rewards.on_constant"] = why
    yield from unread(config, reasons)


REWARD_CHECKS = (check_functions, check_sum, check_model, check_unread)
