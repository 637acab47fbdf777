"""Real scorers for tests: each keeps its processes until the test process ends, and they end with it."""

import copy
import functools
import json

from megarl.config_rewards import RewardConfig, RewardsConfig, as_rewards
from megarl.rewards.scorer import Scorer
from megarl.sample import Prompt, Sample

REPORTED: list[str] = []  # what the scorers have reported, the last line last


def scorer(rewards: str | dict, **settings) -> Scorer:
    """Of `algorithm.reward` and `rewards` as a config has them; those of the same rewards share their processes."""
    made = copy.copy(_started(json.dumps(rewards)))
    made.settings = RewardsConfig(**settings)
    return made


@functools.cache
def _started(rewards: str) -> Scorer:
    parts = {name: RewardConfig(**part) for name, part in as_rewards(json.loads(rewards)).items()}
    return Scorer(parts, RewardsConfig(num_workers=1), REPORTED.append).__enter__()


def samples_with(answers: list[str | None], response: str = "#### 18", group_size: int = 1) -> list[Sample]:
    """One response for each answer; `group_size` of them follow each other in a group."""
    prompts = [
        Prompt(messages=[], token_ids=[1], answer=answer, metadata={"source": f"train.jsonl:{line}"})
        for line, answer in enumerate(answers, start=1)
    ]
    return [
        Sample.from_response(prompt, [2], group_id=i // group_size, index=i, response_text=response)
        for i, prompt in enumerate(prompts)
    ]
