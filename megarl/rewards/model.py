"""The reward `model`: what a trained reward model says of whole conversations, on the Megatron engine or by SGLang."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from megarl.cluster.cluster import Cluster
from megarl.cluster.placement import REWARD_SERVER
from megarl.cluster.role import RoleGroup
from megarl.config import Config
from megarl.data.chat import blamed_on, load_tokenizer, read_tokenizer, render
from megarl.data.responses import with_score_token
from megarl.engine.hf.shape import ModelShape
from megarl.errors import ConfigError, RunError
from megarl.rewards.pool import Outcome
from megarl.rollout.client import RolloutClient
from megarl.rollout.server import CLASSIFIERS
from megarl.sample import Prompt, Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# token ids of each sequence -> a function that waits for (who scored it, its score) of each
Begin = Callable[[list[list[int]]], Callable[[], list[tuple[str, float]]]]


class RewardTokens:
    """What the reward model reads of a sample: the token ids as they were sampled, where it has the policy's vocabulary
    and its chat template gives the prompt the same ids; else the conversation under its own template and tokenizer.

    The template is that of its folder, or data.chat_template where that has none. A response that ended has the
    end-of-turn token, as in the reward model's training; a truncated one has none.
    """

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase", prompts: list[Prompt]):
        """`tokenizer`: the policy's. Raises ConfigError where the folder is no reward model that can be used, where its
        template refuses the first of the prompts, or where its context is shorter than what the policy may write."""
        self.role = "reward_model" if config.roles.reward_server is None else "reward_server"
        key, path = f"roles.{self.role}.path", config.model_of(self.role).path
        shape = ModelShape.read(path)
        self.vocab_size, self.context_length = shape.vocab_size, shape.max_positions
        check_head(key, path, shape, is_served=self.role == "reward_server")
        with blamed_on(key):
            has_template = read_tokenizer(path).chat_template is not None
            self.tokenizer = load_tokenizer(path, None if has_template else config.data.chat_template)
            render(self.tokenizer, prompts[0].messages, prompts[0].tools)
        self.same_vocabulary = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        prompt, response = config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens
        if self.same_vocabulary and prompt + response > self.context_length:
            raise ConfigError(
                f"{key}: data.max_prompt_tokens + rollout.sampling.max_new_tokens = {prompt} + {response} = "
                f"{prompt + response} is more than the reward model's max_position_embeddings = {self.context_length}"
            )

    @property
    def part(self) -> str:
        """What of a cluster gives the scores, by the name that it has there."""
        return REWARD_SERVER if self.role == "reward_server" else self.role

    def encode(self, samples: list[Sample]) -> list[list[int]]:
        """The ids of each sample. Raises RunError naming one that the reward model cannot read."""
        prompts: dict[int, list[int]] = {}  # a group's samples have the same one
        encoded = []
        for sample in samples:
            if id(sample.prompt) not in prompts:
                prompts[id(sample.prompt)] = self._prompt_ids(sample)
            ids = self._ids(sample, prompts[id(sample.prompt)])
            if len(ids) > self.context_length:
                text = f"has {len(ids)} tokens for the reward model, more than its context of {self.context_length}"
                raise RunError(f"{name_of(sample)} {text} (roles.{self.role}.path)")
            if (largest := max(ids)) >= self.vocab_size:  # the policy's vocabulary may be padded beyond it
                text = f"has token {largest}, but the reward model has {self.vocab_size} tokens"
                raise RunError(f"{name_of(sample)} {text} (roles.{self.role}.path)")
            encoded.append(ids)
        return encoded

    def _prompt_ids(self, sample: Sample) -> list[int]:
        try:
            return render(self.tokenizer, sample.prompt.messages, sample.prompt.tools)
        except ConfigError as error:
            raise RunError(f"{name_of(sample)}: roles.{self.role}.path: {error}") from error

    def _ids(self, sample: Sample, prompt_ids: list[int]) -> list[int]:
        if self.same_vocabulary and prompt_ids == sample.prompt.token_ids:
            return sample.token_ids.tolist()
        # The policy's text is text: an end-of-turn token that it spells out is none.
        text = self.tokenizer.encode(sample.response_text, add_special_tokens=False, split_special_tokens=True)
        return prompt_ids + text + [self.tokenizer.eos_token_id] * (sample.status is Status.COMPLETED)


class RewardModel:
    """Scores as the reward model has learnt to: the higher, the better, on a scale of its own."""

    def __init__(self, tokens: RewardTokens, begin: Begin, ranks: list[RoleGroup]):
        """`ranks`: that nobody looks at while the policy generates."""
        self.tokens = tokens
        self.ranks = ranks
        self._begin = begin

    @classmethod
    def start(cls, stack: ExitStack, config: Config, cluster: Cluster, tokens: RewardTokens) -> "RewardModel":
        """Start its ranks, or wait for its servers, which `Cluster.start_servers` has started; what has to be closed
        goes to `stack`. Raises RunError with the log's end of what does not start."""
        if tokens.role == "reward_model":
            ranks = cluster.start_role("reward_model")
            return cls(tokens, partial(begin_on_ranks, ranks), [ranks])
        urls = cluster.wait_reward_servers()
        client = RolloutClient.of(config.rollout, urls, stop_token_ids=[], context_length=tokens.context_length)
        stack.callback(client.close)
        return cls(tokens, partial(begin_on_servers, client, urls), [])

    def start_score(self, samples: list[Sample]) -> Callable[[], list[Outcome]]:
        """Begin to score; the returned function waits for what is said of each sample, in order: an error where a score
        is not finite.

        Both raise RunError naming a sample that cannot be read, or the rank or server that died, failed or was late
        (cluster.call_timeout_s; rollout.request_timeout_s and rollout.max_retries).
        """
        start = time.perf_counter()
        wait = self._begin(self.tokens.encode(samples))

        def outcomes() -> list[Outcome]:
            answers = wait()
            seconds = time.perf_counter() - start
            return [outcome_of(sample, *answer, seconds) for sample, answer in zip(samples, answers, strict=True)]

        return outcomes


def outcome_of(sample: Sample, who: str, score: float, seconds: float) -> Outcome:
    if math.isfinite(score):
        return Outcome(score, {}, None, seconds)
    return Outcome(None, {}, f"{who}: the score of {name_of(sample)} is {score:g}, which is not finite", seconds)


def begin_on_ranks(ranks: RoleGroup, token_ids: list[list[int]]) -> Callable[[], list[tuple[str, float]]]:
    sequences = [Sample.from_response(Prompt([], ids), [], group_id=i, index=i) for i, ids in enumerate(token_ids)]
    wait = ranks.start_values([with_score_token(sequence) for sequence in sequences])
    return lambda: [("the reward model", values[-1].item()) for values in wait()]


def begin_on_servers(
    client: RolloutClient, urls: list[str], token_ids: list[list[int]]
) -> Callable[[], list[tuple[str, float]]]:
    """A server that dies ends the run, as it would the next time."""
    pending = client.start_classify(token_ids)

    def wait() -> list[tuple[str, float]]:
        try:
            answers = client.result_or_death(pending, urls, "reward server")
        except RunError as error:
            raise RunError(f"scoring by the reward model: {error}") from error
        return [(f"reward server {urls.index(url)} ({url})", read_score(url, numbers)) for url, numbers in answers]

    return wait


def read_score(url: str, numbers: list[float | None]) -> float:
    """What a server says of one sequence; JSON has no NaN, which comes as null."""
    if len(numbers) != 1:
        raise RunError(f"{url} gave {len(numbers)} numbers for a sequence, and a reward model has one score")
    return math.nan if numbers[0] is None else numbers[0]


def check_head(key: str, path: str, shape: ModelShape, is_served: bool) -> None:
    """Raise ConfigError unless the folder has a head of one score, that SGLang loads as it is where it serves it.

    SGLang 0.5.17 leaves a bias at random values where its class has one and the folder does not, and a bias out where
    its class has none, both in silence.
    """
    found = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys() if name.startswith("score.")}
    weight, bias = found.get("score.weight"), found.get("score.bias")
    if weight is None or tuple(weight.shape) != (1, shape.hidden_size):
        given = "no score.weight" if weight is None else f"a score.weight of shape {tuple(weight.shape)}"
        raise ConfigError(f"{key}: {path} has {given}; a reward model's has shape (1, {shape.hidden_size})")
    if not is_served:
        return
    (architecture,) = shape.hf["architectures"]
    if CLASSIFIERS[architecture] and bias is None:
        text = f"{path} has no score.bias, and SGLang's {architecture} would leave it at a random value; valid: with "
        raise ConfigError(f"{key}: {text}a score.bias of 0, or this one as roles.reward_model.path")
    if not CLASSIFIERS[architecture] and bias is not None and bias.item() != 0:
        text = f"{path} has a score.bias of {bias.item():g}, and SGLang's {architecture} leaves it out; valid: without "
        raise ConfigError(f"{key}: {text}one, or this one as roles.reward_model.path")


def name_of(sample: Sample) -> str:
    return f"sample {sample.index} of group {sample.group_id}"
