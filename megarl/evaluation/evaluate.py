"""Models one after another: servers, responses, rewards; then all of them in one report."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import SERVER
from megarl.config import Config
from megarl.config_rewards import RewardsConfig
from megarl.data import toy
from megarl.data.chat import blamed_on, load_tokenizer
from megarl.data.dataset import load_prompts
from megarl.data.sources import listed, read_source
from megarl.data.stream import first_rows
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError, RunError
from megarl.evaluation.comparison import check_same_prompts, compare
from megarl.evaluation.estimators import metrics_of
from megarl.evaluation.html_report import html_report
from megarl.evaluation.models import Model, served_folder
from megarl.evaluation.results import ModelResult, PromptResult
from megarl.evaluation.scoring import evaluate_samples, find_answer_of
from megarl.evaluation.settings import partial_of
from megarl.evaluation.text_report import csv_report, text_report
from megarl.machine import resolve_device
from megarl.rewards.model import RewardModel, RewardTokens
from megarl.rewards.scorer import Scorer
from megarl.rollout.client import RolloutClient
from megarl.rollout.seeds import seeds_for
from megarl.sample import Prompt, Sample

PrintLine = Callable[[str], None]


class Candidate:
    """A model with the prompts as its tokenizer has them. Raises ConfigError where they do not fit together."""

    def __init__(self, model: Model, config: Config):
        self.model = model
        self.config = config
        self.shape = ModelShape.read(config.model.path)
        with blamed_on(f"--model {model.name}={model.place}"):
            self.tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        self.prompts = load_prompts(config.data.validation, config.data, self.tokenizer, self.shape.max_positions)
        self.reward_tokens: RewardTokens | None = None

    def read_reward_model(self) -> None:
        """Where a model gives the reward."""
        if self.config.roles.reward_model or self.config.roles.reward_server:
            self.reward_tokens = RewardTokens(self.config, self.tokenizer, self.prompts)


def evaluate(configs: dict[Model, Config], max_prompts: int | None, out: Path, print_line: PrintLine) -> None:
    """Evaluate each model by its config and write `out`: NAME.jsonl of each, report.txt, report.csv, report.html.

    Raises ConfigError before anything is started where data or models are wrong, or do not fit together; RunError where
    a model cannot be served, or, after the report is there, where rewards failed.
    """
    config = next(iter(configs.values()))
    if config.toy:
        toy.make(config.toy.folder, config.toy.seed)
    candidates = [Candidate(model, of_model) for model, of_model in configs.items()]
    notes = share_prompts(candidates, max_prompts)
    if (note := why_no_majority(config)) is not None:
        notes.append(note)
    for candidate in candidates:
        candidate.read_reward_model()
    with output_folder(out, print_line) as folder:
        results = []
        with Scorer(config.algorithm.reward, all_may_fail(config), lambda line: None, folder / "logs") as scorer:
            for number, candidate in enumerate(candidates, start=1):
                number_of = f"{number} of {len(candidates)}"
                print_line(f"model {number_of}, {candidate.model.name}: {len(candidate.prompts)} prompts")
                results.append(respond(candidate, scorer, folder, notes, print_line))
                write_rows(results[-1], folder / f"{candidate.model.name}.jsonl")
        print_line(write_reports(config, candidates, results, notes, folder))
    print_line(f"megarl: done; rows and reports are in {out.resolve()}")
    refuse_failures(results)


def share_prompts(candidates: list[Candidate], max_prompts: int | None) -> list[str]:
    """Leave all models the same prompts, at most so many, from all sources in turn; returns what there is to say."""
    data, notes = candidates[0].config.data, []
    num_rows = sum(1 for source in data.validation for _ in read_source(source, []))
    common = set.intersection(*({source_of(prompt) for prompt in candidate.prompts} for candidate in candidates))
    for candidate in candidates:
        if num_left_out := num_rows - len(candidate.prompts):
            name = candidate.model.name
            notes.append(f"{num_left_out} of {num_rows} prompts are left out, for all models: too long for {name}")
    if not common:
        raise ConfigError(f"{listed(data.validation)}: no prompt fits all models (data.max_prompt_tokens)")
    for candidate in candidates:
        prompts = [prompt for prompt in candidate.prompts if source_of(prompt) in common]
        candidate.prompts = first_rows(prompts, max_prompts or len(prompts), len(data.validation))
    # Where each tokenizer cuts long prompts at another place they are no longer the same.
    check_same_prompts([ModelResult(c.model.name, [unanswered(prompt) for prompt in c.prompts]) for c in candidates])
    return notes


def source_of(prompt: Prompt) -> str:
    return prompt.metadata["source"]


def unanswered(prompt: Prompt) -> PromptResult:
    return PromptResult(source_of(prompt), prompt.messages, prompt.answer, [])


def why_no_majority(config: Config) -> str | None:
    evaluation = config.evaluation
    if max(evaluation.pass_at) == 1 or not evaluation.majority or find_answer_of(config.algorithm.reward):
        return None
    rewards = ", ".join(config.algorithm.reward)
    return f"no maj@k: the module of {rewards} has no answer_of, which gives a response's final answer"


def headline(config: Config, candidates: list[Candidate]) -> str:
    evaluation, prompts = config.evaluation, candidates[0].prompts
    temperature = f"temperature {evaluation.temperature:g}" if evaluation.temperature else "temperature 0 (greedy)"
    parts = [
        f"{len(prompts)} prompts of {listed(config.data.validation)}",
        f"responses to each: {evaluation.samples_per_prompt}",
        f"{temperature}, up to {config.rollout.sampling.max_new_tokens} tokens",
        f"reward {', '.join(config.algorithm.reward)}, correct from {evaluation.correct_above:g} on",
        f"seed {config.seed}",
    ]
    return "; ".join(parts)


@contextmanager
def output_folder(out: Path, print_line: PrintLine) -> Iterator[Path]:
    """Within: a folder that becomes `out` at the end. Where the evaluation fails it stays under its own name, with the
    logs and the rows of the models that are done; after an interrupt nothing does."""
    folder = partial_of(out)
    (folder / "logs").mkdir(parents=True)
    try:
        yield folder
    except Exception:
        print_line(f"logs, and rows of the models that were done, are in {folder}")
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder / "logs")
    folder.rename(out)


def all_may_fail(config: Config) -> RewardsConfig:
    """A reward that fails is counted: the others are not lost for it."""
    return config.rewards.model_copy(update={"on_error": "drop_sample", "max_error_ratio": 1.0})


def respond(candidate: Candidate, scorer: Scorer, folder: Path, notes: list[str], print_line: PrintLine) -> ModelResult:
    """Serve a model, have it answer the prompts, and score what it says. Its servers end before this returns."""
    model, config, tokens = candidate.model, candidate.config, candidate.reward_tokens
    parts = {SERVER, tokens.part} if tokens else {SERVER}
    with ExitStack() as stack:
        path = stack.enter_context(served_folder(model, folder))
        served = config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
        logs, device = folder / "logs" / model.name, resolve_device(config)
        cluster = stack.enter_context(Cluster(served, device, logs, report=print_line, parts=parts))
        cluster.start_servers()
        scorer.model = RewardModel.start(stack, served, cluster, tokens) if tokens else None
        samples = generate(stack, served, cluster, candidate)
        return evaluate_samples(model.name, samples, scorer, config, settings_of(candidate, notes))


def generate(stack: ExitStack, config: Config, cluster: Cluster, candidate: Candidate) -> list[Sample]:
    urls, evaluation = cluster.wait_servers(), config.evaluation
    stop = [candidate.tokenizer.eos_token_id]
    client = RolloutClient.of(config.rollout, urls, stop_token_ids=stop, context_length=candidate.shape.max_positions)
    stack.callback(client.close)
    prompts, number = candidate.prompts, evaluation.samples_per_prompt
    temperature, limit = evaluation.temperature, config.rollout.sampling.max_new_tokens
    seeds = seeds_for(config, 0, prompts, number, candidate.shape.vocab_size, temperature, limit)
    while_waiting = partial(client.raise_dead, urls, "rollout server")
    return client.generate(prompts, number, candidate.tokenizer, temperature, while_waiting, seeds)


def settings_of(candidate: Candidate, notes: list[str]) -> dict[str, str | float]:
    config = candidate.config
    evaluation = config.evaluation
    settings = {
        "model": candidate.model.place,
        "dtype": config.model.dtype,
        "data": listed(config.data.validation),
        "reward": ", ".join(config.algorithm.reward),
        "correct from": evaluation.correct_above,
        "temperature": evaluation.temperature,
        "samples per prompt": evaluation.samples_per_prompt,
        "max_new_tokens": config.rollout.sampling.max_new_tokens,
        "seed": config.seed,
    }
    return settings | ({"notes": "; ".join(notes)} if notes else {})


def write_rows(result: ModelResult, file: Path) -> None:
    """A line per prompt: source, messages, answer, and responses as `Response` has them."""
    with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:  # half a surrogate pair is escaped
        stream.writelines(
            json.dumps(dataclasses.asdict(prompt), ensure_ascii=False) + "\n" for prompt in result.prompts
        )


def write_reports(
    config: Config, candidates: list[Candidate], results: list[ModelResult], notes: list[str], folder: Path
) -> str:
    """Returns the text of it."""
    evaluation = config.evaluation
    draws = {"num_resamples": evaluation.bootstrap_samples, "seed": config.seed}
    metrics = {
        result.name: metrics_of(result, evaluation.pass_at, evaluation.correct_above, **draws) for result in results
    }
    comparisons = compare(results, **draws)
    models = [f"{candidate.model.name}: {candidate.model.place}" for candidate in candidates]
    lines = [headline(config, candidates), *models, *(f"note: {note}" for note in notes), ""]
    text = "\n".join(lines) + "\n" + text_report(metrics, comparisons)
    (folder / "report.txt").write_text(text.rstrip() + "\n", encoding="utf-8")
    (folder / "report.csv").write_text(csv_report(metrics), encoding="utf-8")
    (folder / "report.html").write_text(html_report(results, metrics, comparisons), encoding="utf-8")
    return text.rstrip()


def refuse_failures(results: list[ModelResult]) -> None:
    """Raise RunError where rewards failed: the numbers are of the others, which the report counts."""
    failed = []
    for result in results:
        errors = [r.error for prompt in result.prompts for r in prompt.responses if r.error is not None]
        if errors:
            failed.append(f"{result.name}: {len(errors)} rewards failed, the first: {errors[0]}")
    if failed:
        raise RunError("\n".join(failed))
