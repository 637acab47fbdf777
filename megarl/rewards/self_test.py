"""What a round of rewards shows before training: its distribution, the samples at its ends, and why it cannot teach."""

import statistics
from collections.abc import Iterable

from megarl.config import Config
from megarl.data.findings import histogram
from megarl.presets import GROUP_RELATIVE
from megarl.rewards.pool import LATENCY_LEVELS
from megarl.rewards.scorer import Scored
from megarl.sample import Sample, Status

NUM_SHOWN = 3  # responses at each end, and failures
NUM_SHOWN_CHARACTERS = 300  # of a response: its end, where answers are
REMEDIES = """What helps:
- where all are at the low end: a warm start on worked responses (warm_start.data, or algorithm.name: sft and its export
  as model.path), easier prompts, a system prompt that asks for the form that the reward reads, more responses per
  prompt (algorithm.group_size), longer ones where they are truncated (rollout.sampling.max_new_tokens);
- where all are at the high end: harder prompts;
- where the responses below should not have equal rewards: the reward itself, or data.answer_key."""


def why_constant(samples: list[Sample], config: Config) -> str | None:
    """Why rewards that do not differ where they are compared teach nothing, and what to try; None where they differ, or
    where the advantage is not made of them."""
    advantage, rewards = config.algorithm.advantage, [sample.reward for sample in samples]
    if advantage == "distillation" or None in rewards:
        return None
    if (parts := config.algorithm.compared_parts) is not None:
        rewards = [tuple(sample.reward_parts[part] for part in parts) for sample in samples]
    groups: dict[int, set] = {}
    for sample, reward in zip(samples, rewards):
        groups.setdefault(sample.group_id, set()).add(reward)
    if len(set(rewards)) == 1:
        what = f"all {len(rewards)} rewards are {samples[0].reward:g}"
    elif advantage in GROUP_RELATIVE and all(len(group) == 1 for group in groups.values()):
        what = f"the rewards within each of the {len(groups)} groups are equal, and {advantage} compares them there"
    else:
        return None
    truncated = sum(sample.status is Status.TRUNCATED for sample in samples)
    lines = [
        f"{what}: every advantage is 0, or the same for good and bad responses, so training cannot improve anything.",
        f"{truncated} of {len(samples)} responses are truncated.",
        REMEDIES,
        "Some responses:",
        *shown(samples[:NUM_SHOWN]),
    ]
    return "\n".join(lines)


def report(scored: Scored, num_samples: int) -> str:
    """A table of the reward and its parts, a histogram, groups, times, failures, and the samples at both ends."""
    samples = scored.samples
    lines = [f"{num_samples} responses, {len(scored.failures)} rewards failed"]
    if scored.failures:
        reasons = list(dict.fromkeys(scored.failures.values()))
        lines += ["", "failures", *(f"  {reason}" for reason in reasons[:NUM_SHOWN])]
    if not samples:
        return "\n".join(lines)
    lines += ["", f"{'':24}" + "".join(f"{name:>10}" for name in ("mean", "std", "min", "median", "max", "distinct"))]
    columns = {"reward": [sample.reward for sample in samples]}
    for name in dict.fromkeys(name for sample in samples for name in sample.reward_parts):
        columns[f"  {name}"] = [sample.reward_parts[name] for sample in samples if name in sample.reward_parts]
    lines += [table_row(name, values) for name, values in columns.items()]
    lines += ["", "reward", *histogram(columns["reward"])]
    groups: dict[int, set[float]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, set()).add(sample.reward)
    equal = sum(len(group) == 1 for group in groups.values())
    lines += ["", f"groups: {len(groups)}, {equal} of them with equal rewards"]
    times = [f"p{level} {scored.metrics[f'reward/latency_p{level}_s'] * 1e3:.3g} ms" for level in LATENCY_LEVELS]
    lines += ["time for one reward: " + ", ".join(times)]
    ordered = sorted(samples, key=lambda sample: sample.reward)
    lines += ["", "lowest", *shown(ordered[:NUM_SHOWN]), "", "highest", *shown(ordered[: -NUM_SHOWN - 1 : -1])]
    return "\n".join(lines)


def table_row(name: str, values: list[float]) -> str:
    numbers = (statistics.fmean(values), statistics.pstdev(values), min(values), statistics.median(values), max(values))
    return f"{name:24}" + "".join(f"{number:10.4g}" for number in numbers) + f"{len(set(values)):10}"


def shown(samples: Iterable[Sample]) -> list[str]:
    lines = []
    for sample in samples:
        text = sample.response_text
        text = text if len(text) <= NUM_SHOWN_CHARACTERS else "..." + text[-NUM_SHOWN_CHARACTERS:]
        source = sample.prompt.metadata.get("source", "a prompt")
        lines.append(f"  {sample.reward:g}  {source}, answer {sample.prompt.answer!r}, {sample.status.value}: {text!r}")
    return lines
