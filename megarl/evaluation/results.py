"""The responses of one model to a set of prompts, with their rewards: what every number of an evaluation comes from."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megarl.sample import Sample, Status


@dataclass
class Response:
    """One whose reward failed has no reward and an `error`: it is no 0, and counts only where no reward is needed."""

    text: str
    num_tokens: int
    truncated: bool
    reward: float | None
    reward_parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None  # the final answer, as it votes in maj@k; None where the text has none
    error: str | None = None  # why there is no reward

    def is_correct(self, threshold: float) -> bool:
        """Of one that has a reward."""
        assert self.reward is not None, f"a response without a reward: {self.error}"
        return self.reward >= threshold


@dataclass
class PromptResult:
    source: str  # file:line, by which prompts of several models are matched
    messages: list[dict[str, Any]]
    answer: str | None  # the reference answer
    responses: list[Response]

    @property
    def scored(self) -> list[Response]:
        """Those that have a reward."""
        return [response for response in self.responses if response.reward is not None]

    @property
    def mean_reward(self) -> float:
        """Of those that have a reward: there must be one."""
        return statistics.fmean(response.reward for response in self.scored)


@dataclass
class ModelResult:
    name: str
    prompts: list[PromptResult]
    settings: dict[str, Any] = field(default_factory=dict)  # temperature, samples per prompt, seed: shown, never read
    has_answers: bool = False  # whether final answers were looked for: without, there is no maj@k


def result_of(
    name: str,
    samples: list[Sample],
    settings: dict[str, Any],
    failures: dict[int, str] | None = None,
    answer_of: Callable[[str], str | None] | None = None,
) -> ModelResult:
    """Of all samples that were generated, scored or not; those of one `group_id` are the responses to one prompt.

    `failures`: place of a sample -> why its reward failed, as in `Scored`. `answer_of`: a response's final answer, in
    a form that is the same text for equal answers, or None where it has none.
    """
    prompts: dict[int, PromptResult] = {}
    for place, sample in enumerate(samples):
        assert sample.status is not Status.ABORTED, f"sample {place} is no whole response"
        prompt = sample.prompt
        if sample.group_id not in prompts:
            prompts[sample.group_id] = PromptResult(prompt.metadata["source"], prompt.messages, prompt.answer, [])
        error = None
        if sample.reward is None:
            error = (failures or {}).get(place, "its reward was dropped with its group")
        response = Response(
            text=sample.response_text,
            num_tokens=sample.response_length,
            truncated=sample.status is Status.TRUNCATED,
            reward=sample.reward,
            reward_parts=dict(sample.reward_parts),
            answer=answer_of(sample.response_text) if answer_of else None,
            error=error,
        )
        prompts[sample.group_id].responses.append(response)
    return ModelResult(name, list(prompts.values()), settings, has_answers=answer_of is not None)
