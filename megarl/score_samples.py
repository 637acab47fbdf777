"""`megarl reward`: a config's rewards on samples from a file or from the model, without training."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import SERVER
from megarl.config import Config
from megarl.config_data import DataConfig
from megarl.data import toy
from megarl.data.dataset import parse_prompt
from megarl.data.row_errors import raise_if_any, short
from megarl.data.sources import read_rows
from megarl.errors import ConfigError, RunError
from megarl.inputs import Inputs
from megarl.machine import resolve_device
from megarl.rewards.model import RewardModel
from megarl.rewards.scorer import Scorer
from megarl.rewards.self_test import report, why_constant
from megarl.rollout.client import RolloutClient
from megarl.sample import Prompt, Sample, Status

LOGGED = {"messages", "step", "group"}  # columns by which a line of samples.jsonl is known
STATUSES = [status.value for status in Status]


def run(config: Config, samples_file: str | None, num_prompts: int | None, print_line: Callable[[str], None]) -> None:
    """Score the samples of a file, or responses of the model in model.path to the first prompts of the run, and print
    what the rewards are like.

    Raises ConfigError for wrong input; RunError where a reward failed, or where the rewards cannot teach anything.
    """
    if config.algorithm.is_supervised or not config.algorithm.reward:
        raise ConfigError(f"algorithm.name: {config.algorithm.name} has no rewards (algorithm.reward)")
    if config.toy:
        toy.make(config.toy.folder, config.toy.seed)
    inputs = Inputs(config)
    samples = read_samples(samples_file, config, inputs) if samples_file else None
    # Nothing but what answers here is started, and on GPUs of its own.
    alone = config.model_copy(update={"placement": "disaggregated"})
    parts = {SERVER} if samples is None else set()
    if tokens := inputs.reward_tokens:
        parts.add(tokens.part)
    with ExitStack() as stack:
        logs = stack.enter_context(log_folder(print_line))
        all_may_fail = config.rewards.model_copy(update={"on_error": "drop_sample", "max_error_ratio": 1.0})
        scorer = stack.enter_context(Scorer(config.algorithm.reward, all_may_fail, lambda line: None, logs))
        if parts:
            cluster = stack.enter_context(Cluster(alone, resolve_device(config), logs, report=print_line, parts=parts))
            cluster.start_servers()
        if tokens:
            scorer.model = RewardModel.start(stack, config, cluster, tokens)
        if samples is None:
            samples = generate(stack, config, cluster, inputs, num_prompts or config.algorithm.prompts_per_step)
        scored = scorer.score(samples)
        if samples_file is None and config.warm_start.data:
            print_line(f"responses of {config.model.path}, as it is before the warm start")
        print_line(report(scored, len(samples)))
        if scored.failures:
            raise RunError(f"{len(scored.failures)} of {len(samples)} rewards failed; training would stop or drop them")
    if why := why_constant(scored.samples, config):
        raise RunError(why)


@contextmanager
def log_folder(print_line: Callable[[str], None]) -> Iterator[Path]:
    """A folder for what processes print, kept and named where the run fails."""
    folder = Path(tempfile.mkdtemp(prefix="megarl-reward-"))
    try:
        yield folder
    except RunError:
        print_line(f"logs are in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def generate(stack: ExitStack, config: Config, cluster: Cluster, inputs: Inputs, num_prompts: int) -> list[Sample]:
    """`group_size` responses to each of the first prompts of the run, by the weights in model.path."""
    prompts = inputs.stream.next(num_prompts)
    urls = cluster.wait_servers()
    client = RolloutClient.of(
        config.rollout,
        urls,
        stop_token_ids=[inputs.tokenizer.eos_token_id],
        context_length=inputs.context_length,
    )
    stack.callback(client.close)
    while_waiting = partial(client.raise_dead, urls, "rollout server")
    return client.generate(prompts, config.algorithm.group_size, inputs.tokenizer, while_waiting=while_waiting)


def read_samples(path: str, config: Config, inputs: Inputs) -> list[Sample]:
    """Of a run's samples.jsonl, or of rows with data.prompt_key, data.response_key and what the reward needs.

    A logged row whose source is a row of the config's data has that row's columns again. Rows that follow each other
    with one prompt are a group. Raises ConfigError naming all wrong rows.
    """
    errors: list[str] = []
    known = {prompt.metadata["source"]: prompt for prompt in inputs.prompts + inputs.validation}
    samples: list[Sample] = []
    last, group_id = None, -1
    for number, row in read_rows(path, errors):
        where, is_logged = f"{path}:{number}", LOGGED <= row.keys()
        key = "response" if is_logged else config.data.response_key
        prompt = known_prompt(row, where, known, errors) if is_logged else None
        if prompt is None:
            prompt = new_prompt(row, where, config.data, is_logged, key, inputs, errors)
        text, status = row.get(key), row.get("status") if is_logged else Status.COMPLETED.value
        if not isinstance(text, str):
            columns = f"columns: {', '.join(row)}"
            errors.append(f"{where}: {key}: wanted a response's text, given {short(text)}; {columns}")
        if status not in STATUSES:
            errors.append(f"{where}: status: given {short(status)}, valid: {', '.join(STATUSES)}")
        if errors:
            continue
        place = (row["step"], row["group"]) if is_logged else prompt.token_ids
        if place != last:
            last, group_id = place, group_id + 1
        end = [inputs.tokenizer.eos_token_id] * (status == Status.COMPLETED.value)
        response_ids = inputs.tokenizer.encode(text, add_special_tokens=False) + end
        fields = {"response_text": text, "status": Status(status)}
        samples.append(Sample.from_response(prompt, response_ids, group_id=group_id, index=len(samples), **fields))
    raise_if_any(errors, path)
    if not samples:
        raise ConfigError(f"{path}: no rows")
    return samples


def known_prompt(row: dict, where: str, known: dict[str, Prompt], errors: list[str]) -> Prompt | None:
    """The prompt that a logged row is about, where the config's data have it."""
    source = row.get("source")
    prompt = known.get(source) if isinstance(source, str) else None
    if prompt is not None and prompt.messages != row["messages"]:
        errors.append(f"{where}: messages: not those of {source}, which has changed since")
    return prompt


def new_prompt(
    row: dict, where: str, data: DataConfig, is_logged: bool, response_key: str, inputs: Inputs, errors: list[str]
) -> Prompt | None:
    """The prompt that a row holds; None where something was added to `errors`."""
    if is_logged:  # its messages have the system prompt, and an answer if there was one
        columns = {"prompt_key": "messages", "tools_key": "tools", "system_prompt": None}
        data = data.model_copy(update=columns | {"answer_key": "answer" if "answer" in row else None})
    return parse_prompt(row, where, data, inputs.tokenizer, data.answer_key, errors, (response_key,))
