"""Tokenizer and data of a run, read and checked before anything is started."""

from megarl.config import Config
from megarl.data.chat import load_tokenizer
from megarl.data.dataset import check_enough, load_answered, load_prompts
from megarl.data.preferences import load_pairs, scored
from megarl.engine.hf.shape import ModelShape
from megarl.rollout.teacher import check_same_tokens
from megarl.sample import Prompt, Sample


class Inputs:
    """Of a run that generates: prompts. Raises ConfigError where data, tokenizer or model do not fit."""

    def __init__(self, config: Config):
        shape = ModelShape.read(config.model.path)
        self.context_length, self.vocab_size = shape.max_positions, shape.vocab_size
        self.tokenizer = load_tokenizer(config.model.path)
        if config.roles.teacher is not None:
            check_same_tokens(self.tokenizer, config.roles.teacher.path)
        self.prompts = load_prompts(config.data.train, config.data, self.tokenizer, self.context_length)
        check_enough(self.prompts, config.algorithm.prompts_per_step, config.data.train)
        self.validation: list[Prompt] = []
        if config.data.validation:
            prompts = load_prompts(config.data.validation, config.data, self.tokenizer, self.context_length)
            self.validation = prompts[: config.trainer.evaluate_prompts]
        self.warm_start: list[Sample] = []
        if config.warm_start.data:
            self.warm_start = load_answered(config.warm_start.data, config.data, self.tokenizer, self.context_length)


class AnsweredInputs:
    """Of a supervised run: rows of one sample each, or of a chosen and a rejected one. Raises as Inputs."""

    def __init__(self, config: Config):
        self.config = config
        self.context_length = ModelShape.read(config.model.path).max_positions
        self.tokenizer = load_tokenizer(config.model.path)
        self.rows = self._rows(config.data.train)
        check_enough(self.rows, config.algorithm.prompts_per_step, config.data.train)
        self.validation: list[list[Sample]] = []
        if config.data.validation:
            self.validation = self._rows(config.data.validation)[: config.trainer.evaluate_prompts]

    def _rows(self, path: str) -> list[list[Sample]]:
        data, name = self.config.data, self.config.algorithm.name
        if name == "sft":
            return [[s] for s in load_answered(path, data, self.tokenizer, self.context_length, data.response_key)]
        samples = load_pairs(path, data, self.tokenizer, self.context_length, data.chosen_key, data.rejected_key)
        if name == "reward_model":
            samples = [scored(sample) for sample in samples]
        return [samples[i : i + 2] for i in range(0, len(samples), 2)]
