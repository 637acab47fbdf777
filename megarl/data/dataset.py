"""JSONL rows to prompts, and the order in which a run sees them."""

import functools
import json
import logging
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config import DataConfig
from megarl.data import chat
from megarl.errors import ConfigError
from megarl.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NUM_SHOWN_ERRORS = 10


def load_prompts(
    path: str | Path,
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    context_length: int | None = None,
) -> list[Prompt]:
    """The prompts of a JSONL file, in its order.

    `data_config.prompt_key` names a column with the user's text or with a list of {"role", "content"}, the last one
    the user's. The other columns and `source` (file:line) become metadata; a row's own `source` is kept there as
    `source_column`. Prompts longer than max_prompt_tokens, or that leave no room for one new token in
    `context_length`, are dropped with one log line. Lengths are those of the templated token ids.

    Raises ConfigError naming every wrong row (file:line and key), or where no prompt is left.
    """
    errors: list[str] = []
    prompts = []
    for line, row in read_rows(path, errors):
        prompt = parse_prompt(row, f"{path}:{line}", data_config, tokenizer, data_config.answer_key, errors)
        if prompt is not None:
            prompts.append(prompt)
    raise_if_any(errors, path)
    return _drop_overlong(prompts, path, data_config.max_prompt_tokens, context_length)


def check_enough(rows: list, prompts_per_step: int, path: str | Path, what: str = "prompts after filtering") -> None:
    """Raise ConfigError where one step would have to use a row twice."""
    if len(rows) < prompts_per_step:
        raise ConfigError(f"{len(rows)} {what} < algorithm.prompts_per_step={prompts_per_step} ({path})")


class PromptStream:
    """Endless prompts, or rows of samples: an epoch is a shuffle by seed and epoch alone, and uses each of them once.

    `position` is (epoch, offset within it): all that has to be saved, and set again, to go on in the same order.
    """

    def __init__(self, prompts: list, seed: int):
        if not prompts:
            raise ConfigError("a prompt stream needs at least one prompt")
        self.prompts = prompts
        self.seed = seed
        self.position = (0, 0)

    def next(self, n: int) -> list:
        """The next n prompts; where an epoch ends among them, the next one's begin."""
        taken = []
        while len(taken) < n:
            epoch, offset = self.position
            order = _epoch_order(len(self.prompts), self.seed, epoch)
            chosen = order[offset : offset + n - len(taken)]
            taken += [self.prompts[i] for i in chosen]
            offset += len(chosen)
            self.position = (epoch, offset) if offset < len(order) else (epoch + 1, 0)
        return taken


@functools.lru_cache(maxsize=4)
def _epoch_order(num_prompts: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_prompts))
    random.Random(f"prompts:{seed}:{epoch}").shuffle(order)  # seeded by a string: the same in every process
    return tuple(order)


def read_rows(path: str | Path, errors: list[str]) -> Iterator[tuple[int, dict]]:
    """Yield (line number from 1, row); blank lines are no rows. Lines that are no JSON object are added to `errors`,
    which `raise_if_any` reports. Raises ConfigError for a missing file."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                text = raw.decode("utf-8")
                row = json.loads(text)
                if "\\ud" in text.lower():  # an escaped half of a surrogate pair is legal JSON and no text
                    json.dumps(row, ensure_ascii=False).encode("utf-8")
            except ValueError as error:  # not UTF-8, or not JSON
                errors.append(f"{path}:{line}: not JSON: {error}")
                continue
            if isinstance(row, dict):
                yield line, row
            else:
                errors.append(f"{path}:{line}: wanted a JSON object, given {short(row)}")


def parse_prompt(
    row: dict,
    source: str,
    data_config: DataConfig,
    tokenizer: "PreTrainedTokenizerBase",
    answer_key: str | None,
    errors: list[str],
    response_keys: tuple[str, ...] = (),
) -> Prompt | None:
    """The prompt of one row, the columns that others read left out of its metadata; None where something was added to
    `errors`."""
    num_errors = len(errors)
    messages = _parse_messages(row, source, data_config, errors)
    answer = None if answer_key is None else _parse_answer(row, source, answer_key, errors)
    if len(errors) > num_errors:
        return None
    try:
        token_ids = chat.render(tokenizer, messages)
    except ConfigError as error:
        errors.append(f"{source}: {data_config.prompt_key}: {error}")
        return None
    read = (data_config.prompt_key, answer_key, *response_keys)
    metadata = {key: value for key, value in row.items() if key not in read}
    if "source" in metadata:
        metadata["source_column"] = metadata["source"]
    metadata["source"] = source
    return Prompt(messages=messages, token_ids=token_ids, answer=answer, metadata=metadata)


def _parse_messages(row: dict, source: str, data_config: DataConfig, errors: list[str]) -> list[dict[str, str]]:
    key = data_config.prompt_key
    if not has_column(row, source, key, "data.prompt_key", errors):
        return []
    value = row[key]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(messages, list) or not messages:
        errors.append(f"{source}: {key}: wanted a string or a non-empty list of messages, given {short(value)}")
        return []
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            errors.append(f'{source}: {key}: wanted messages {{"role", "content"}}, given {short(message)}')
            return []
        if not isinstance(message["role"], str) or not isinstance(message["content"], str):
            errors.append(f"{source}: {key}: role and content are strings, given {short(message)}")
            return []
        if not message["content"].strip():
            errors.append(f"{source}: {key}: empty {message['role']} text")
            return []
    if messages[-1]["role"] != "user":
        errors.append(f"{source}: {key}: the last message is the user's, given role {short(messages[-1]['role'])}")
        return []
    if data_config.system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": data_config.system_prompt}, *messages]
    return messages


def _parse_answer(row: dict, source: str, key: str, errors: list[str]) -> str | None:
    if not has_column(row, source, key, "data.answer_key; null: no answers", errors):
        return None
    value = row[key]
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str) or not value.strip():
        errors.append(f"{source}: {key}: wanted a non-empty string or a finite number, given {short(value)}")
        return None
    return value


def has_column(row: dict, source: str, column: str, named_by: str, errors: list[str]) -> bool:
    if column not in row:
        errors.append(f"{source}: no column {column} ({named_by}); columns: {', '.join(row) or 'none'}")
    return column in row


def _drop_overlong(
    prompts: list[Prompt], path: str | Path, max_prompt_tokens: int, context_length: int | None
) -> list[Prompt]:
    if not prompts:
        raise ConfigError(f"{path}: no rows")
    limit, name = max_prompt_tokens, f"data.max_prompt_tokens={max_prompt_tokens}"
    if context_length is not None and context_length - 1 < limit:
        limit, name = context_length - 1, f"{context_length - 1}, the model's context less one new token"
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
    num_dropped = len(prompts) - len(kept)
    if num_dropped:
        log.warning("dropped %d of %d prompts longer than %s (%s)", num_dropped, len(prompts), name, path)
    if not kept:
        shortest = min(len(prompt.token_ids) for prompt in prompts)
        raise ConfigError(f"{path}: all {len(prompts)} prompts are longer than {name}; the shortest has {shortest}")
    return kept


def raise_if_any(errors: list[str], path: str | Path) -> None:
    if not errors:
        return
    shown = errors[:NUM_SHOWN_ERRORS]
    count = f"{len(errors)} error(s) in {path}"
    if len(errors) > len(shown):
        count += f", the first {len(shown)}"
    raise ConfigError("\n  ".join([count + ":", *shown]))


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
