"""The evaluation's section of the config: how held-out prompts are answered, and what is counted of the responses."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from megarl.config_section import Section
from megarl.config_violation import Violation, in_yaml

if TYPE_CHECKING:
    from megarl.config import Config


class EvaluationConfig(Section):
    """Of `megarl eval`, and of the validations during a training."""

    temperature: float = Field(0.0, ge=0, description="0: greedy")
    samples_per_prompt: int = Field(1, ge=1, description="responses to each prompt")
    max_new_tokens: int | None = Field(None, ge=1, description="of a response; null: rollout.sampling.max_new_tokens")
    pass_at: list[int] = Field(
        [1], min_length=1, description="each k of pass@k, and of maj@k where it is more than 1: a YAML list"
    )
    majority: bool = Field(
        True, description="maj@k too, where the module of a reward has answer_of: a response's final answer"
    )
    correct_above: float = Field(1.0, description="the least reward of a response that counts as correct")
    bootstrap_samples: int = Field(10_000, ge=100, description="drawn for the confidence intervals")


def check_evaluation(config: "Config") -> Iterator[Violation]:
    evaluation = config.evaluation
    ks, number = evaluation.pass_at, evaluation.samples_per_prompt
    if min(ks) < 1 or len(set(ks)) < len(ks):
        text = f"given {in_yaml(ks)}, allowed: whole numbers >= 1, each of them once"
        yield Violation(text, ("evaluation.pass_at",))
    if max(ks) > number:
        text = f"given {in_yaml(ks)}, but evaluation.samples_per_prompt is {number}, and pass@k needs k responses; "
        yield Violation(f"{text}valid: up to {number}", ("evaluation.pass_at", "evaluation.samples_per_prompt"))
    if evaluation.temperature == 0 and number > 1:
        text = f"given {number}, but evaluation.temperature is 0, and greedy responses to a prompt are all the same; "
        text += "valid: 1, or a temperature > 0"
        yield Violation(text, ("evaluation.samples_per_prompt", "evaluation.temperature"))
