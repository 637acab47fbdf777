"""`megarl reward`: a config's rewards on samples from a file or from the model, without training."""

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import REWARD_SERVER, SERVER
from megarl.config import Config
from megarl.data import chat, toy
from megarl.data.dataset import parse_prompt
from megarl.data.row_errors import raise_if_any, short
from megarl.data.sources import read_rows
from megarl.data.stream import PromptStream
from megarl.errors import ConfigError, RunError
from megarl.inputs import Inputs
from megarl.machine import resolve_device
from megarl.rewards.model import RewardModel
from megarl.rewards.scorer import Scored, Scorer
from megarl.rewards.self_test import report, why_constant
from megarl.rollout.client import RolloutClient
from megarl.sample import Prompt, Sample, Status

LOGGED = {"messages", "response", "status", "step", "group"}  # columns of a run's samples.jsonl


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
        parts.add(REWARD_SERVER if tokens.role == "reward_server" else tokens.role)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-reward-")))
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
    refuse(scored, len(samples), config)


def generate(stack: ExitStack, config: Config, cluster: Cluster, inputs: Inputs, num_prompts: int) -> list[Sample]:
    """`group_size` responses to each of the first prompts of the run, by the weights in model.path."""
    prompts = PromptStream(inputs.prompts, config.seed, inputs.weights).next(num_prompts)
    client = RolloutClient.of(
        config.rollout,
        cluster.wait_servers(),
        stop_token_ids=[inputs.tokenizer.eos_token_id],
        context_length=inputs.context_length,
    )
    stack.callback(client.close)

    def raise_dead() -> None:
        if dead := client.take_dead():
            raise RunError("; ".join(f"rollout server {url} is gone: {why}" for url, why in dead.items()))

    return client.generate(prompts, config.algorithm.group_size, inputs.tokenizer, while_waiting=raise_dead)


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
        where = f"{path}:{number}"
        if LOGGED <= row.keys():
            prompt = logged_prompt(row, where, known, inputs, errors)
            text, status, place = row["response"], row["status"], (row["step"], row["group"])
        else:
            key = config.data.response_key
            prompt = parse_prompt(row, where, config.data, inputs.tokenizer, config.data.answer_key, errors, (key,))
            text, status = row.get(key), Status.COMPLETED.value
            place = prompt and prompt.token_ids
        if not isinstance(text, str):
            given = f"given {short(text)}; columns: {', '.join(row)}"
            errors.append(f"{where}: {config.data.response_key}: wanted a response's text, {given}")
        if prompt is None or not isinstance(text, str):
            continue
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


def logged_prompt(row: dict, where: str, known: dict[str, Prompt], inputs: Inputs, errors: list[str]) -> Prompt | None:
    """The prompt of a row of samples.jsonl; None where something was added to `errors`."""
    prompt = known.get(row.get("source"))
    if prompt is None:
        try:
            token_ids = chat.render(inputs.tokenizer, row["messages"], row.get("tools"))
        except ConfigError as error:
            errors.append(f"{where}: messages: {error}")
            return None
        metadata = {"source": row.get("source") or where}
        return Prompt(row["messages"], token_ids, row.get("answer"), metadata, tools=row.get("tools"))
    if prompt.messages != row["messages"]:
        errors.append(f"{where}: messages: not those of {row['source']}, which has changed since")
        return None
    return prompt


def refuse(scored: Scored, num_samples: int, config: Config) -> None:
    if scored.failures:
        raise RunError(f"{len(scored.failures)} of {num_samples} rewards failed; training would stop or drop them")
    if why := why_constant(scored.samples, config):
        raise RunError(why)
