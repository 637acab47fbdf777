"""Tokenizer and data of a run, read and checked before anything is started."""

from megarl.config import Config
from megarl.config_data import SourceConfig
from megarl.data.chat import load_tokenizer
from megarl.data.dataset import load_prompts
from megarl.data.responses import load_responses, with_score_token
from megarl.data.sources import weights_of
from megarl.data.stream import PromptStream, check_enough, first_rows
from megarl.engine.hf.shape import ModelShape
from megarl.rewards.model import RewardTokens
from megarl.rollout.teacher import check_same_tokens
from megarl.sample import Prompt, Sample


class Inputs:
    """Of a run that generates: prompts. Raises ConfigError where data, tokenizer or model do not fit."""

    def __init__(self, config: Config):
        data, algorithm = config.data, config.algorithm
        shape = ModelShape.read(config.model.path)
        self.context_length, self.vocab_size = shape.max_positions, shape.vocab_size
        self.tokenizer = load_tokenizer(config.model.path, data.chat_template)
        if config.roles.teacher is not None:
            check_same_tokens(self.tokenizer, config.roles.teacher.path)
        self.prompts = load_prompts(data.train, data, self.tokenizer, self.context_length)
        check_enough(self.prompts, algorithm.prompts_per_step, data.train, "prompts after filtering")
        self.validation: list[Prompt] = []
        if data.validation:
            prompts = load_prompts(data.validation, data, self.tokenizer, self.context_length)
            self.validation = first_rows(prompts, config.trainer.evaluate_prompts, len(data.validation))
        self.reward_tokens: RewardTokens | None = None
        if config.roles.reward_model or config.roles.reward_server:
            self.reward_tokens = RewardTokens(config, self.tokenizer, self.prompts)
        self.stream = PromptStream(self.prompts, config.seed, weights_of(data.train))
        self.warm_start: list[Sample] = []
        if rows := config.warm_start.data:
            self.warm_start = load_responses(rows, data, self.tokenizer, self.context_length, ("response_key",))


class SupervisedInputs:
    """Of a supervised run: rows of one sample each, or of a chosen and a rejected one. Raises as Inputs."""

    def __init__(self, config: Config):
        self.config = config
        self.context_length = ModelShape.read(config.model.path).max_positions
        self.tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        self.rows = self._rows(config.data.train)
        check_enough(self.rows, config.algorithm.prompts_per_step, config.data.train, "rows")
        self.stream = PromptStream(self.rows, config.seed, weights_of(config.data.train))
        self.validation: list[list[Sample]] = []
        if sources := config.data.validation:
            self.validation = first_rows(self._rows(sources), config.trainer.evaluate_prompts, len(sources))

    def _rows(self, sources: list[SourceConfig]) -> list[list[Sample]]:
        algorithm = self.config.algorithm
        keys = ("chosen_key", "rejected_key") if algorithm.has_pairs else ("response_key",)
        score_tokens = 1 if algorithm.name == "reward_model" else 0
        samples = load_responses(sources, self.config.data, self.tokenizer, self.context_length - score_tokens, keys)
        if score_tokens:
            samples = [with_score_token(sample) for sample in samples]
        return [samples[i : i + len(keys)] for i in range(0, len(samples), len(keys))]
