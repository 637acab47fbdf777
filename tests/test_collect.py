from types import SimpleNamespace

import pytest
from scoring import scorer

from megarl.collect import Collector
from megarl.config import Config
from megarl.data.stream import PromptStream
from megarl.errors import RunError
from megarl.sample import Prompt, Sample, Status

COMPLETED, TRUNCATED = Status.COMPLETED, Status.TRUNCATED
EQUAL, UNEQUAL = (COMPLETED, COMPLETED), (COMPLETED, TRUNCATED)  # the reward is 1 for completed


def collector(groups, rewards=None, **algorithm) -> Collector:
    """One that gets the statuses of these groups, one after another, whatever it asks for; 3 groups of 2 to a step."""
    waiting = iter(groups)
    settings = {"prompts_per_step": 3, "group_size": 2, "reward": "completed", "dynamic_sampling": {}} | algorithm
    config = Config.model_validate({"name": "x", "model": {"path": "m"}, "data": {"train": "t"}, "algorithm": settings})

    def generate(name, prompts, group_size, tokenizer, seeds):
        fleet.calls += 1
        samples = []
        for group_id, prompt in enumerate(prompts):
            for status in next(waiting):
                made = Sample.from_response(prompt, [7], group_id=group_id, index=len(samples), status=status)
                made.policy_version = (fleet.served, fleet.served) if fleet.served else (fleet.version, fleet.version)
                samples.append(made)
        return samples

    fleet = SimpleNamespace(generate=generate, version=0, served=None, calls=0)
    prompts = [Prompt([], [i], metadata={"number": i}) for i in range(1000)]
    inputs = SimpleNamespace(stream=PromptStream(prompts, 1), tokenizer=None, vocab_size=8)
    return Collector(config, inputs, fleet, rewards or scorer(settings["reward"]))


def group_ids(samples: list[Sample]) -> list[int]:
    return [sample.group_id for sample in samples]


def test_without_dynamic_sampling_a_step_is_one_round_as_it_comes():
    samples, generated, metrics = collector([EQUAL, UNEQUAL, EQUAL], dynamic_sampling=None).next(1, {})
    assert samples is generated and group_ids(samples) == [0, 0, 1, 1, 2, 2]
    assert metrics["reward/mean"] == pytest.approx(5 / 6) and metrics["group/zero_std_ratio"] == pytest.approx(2 / 3)


def test_groups_of_equal_rewards_are_replaced_and_those_too_many_are_used_in_the_next_step():
    made = collector([UNEQUAL, EQUAL, UNEQUAL] + [EQUAL] * 3 + [UNEQUAL] * 3 + [UNEQUAL, EQUAL, EQUAL])
    times: dict[str, float] = {}
    samples, generated, metrics = made.next(1, times)
    assert group_ids(samples) == [0, 0, 2, 2, 6, 6] and len(generated) == 18 and made.fleet.calls == 3
    assert metrics["dynamic_sampling/rounds"] == 3 and metrics["dynamic_sampling/kept_groups"] == 2
    assert metrics["dynamic_sampling/missing_groups"] == 0 and metrics["dynamic_sampling/generated_groups"] == 9
    # of all that was generated: 5 of 18 are 0
    assert metrics["reward/mean"] == pytest.approx((3 + 13 * 1 - 3 + 0) / 18)
    assert times.keys() == {"generate", "reward"}
    made.fleet.version = 1
    samples, _, metrics = made.next(2, {})
    assert group_ids(samples) == [7, 7, 8, 8, 9, 9] and made.kept == []
    assert metrics["dynamic_sampling/from_last_step"] == 2
    assert [sample.policy_version for sample in samples] == [(0, 0)] * 4 + [(1, 1)] * 2


def test_no_prompt_is_used_twice_and_whole_groups_stay_together():
    made = collector([EQUAL, UNEQUAL] * 20)
    seen = []
    for step in range(1, 4):
        samples, _, _ = made.next(step, {})
        made.fleet.version = step
        numbers = [sample.prompt.metadata["number"] for sample in samples]
        assert numbers[::2] == numbers[1::2]
        seen += [s.prompt.metadata["number"] for s in samples[::2]]
    assert len(set(seen)) == len(seen) == 9


def test_after_the_last_round_a_step_goes_on_with_what_it_has():
    made = collector([EQUAL, UNEQUAL, EQUAL] * 2, dynamic_sampling={"max_rounds": 2})
    samples, _, metrics = made.next(1, {})
    assert group_ids(samples) == [1, 1, 4, 4]
    assert metrics["dynamic_sampling/missing_groups"] == 1 and metrics["dynamic_sampling/rounds"] == 2


def test_without_any_unequal_group_a_step_has_the_equal_ones():
    samples, _, metrics = collector([EQUAL] * 6, dynamic_sampling={"max_rounds": 2}).next(1, {})
    assert group_ids(samples) == [0, 0, 1, 1, 2, 2] and metrics["dynamic_sampling/missing_groups"] == 3


def test_a_round_may_be_smaller_than_a_step():
    made = collector([UNEQUAL] * 4, dynamic_sampling={"prompts_per_round": 2})
    samples, _, _ = made.next(1, {})
    assert group_ids(samples) == [0, 0, 1, 1, 2, 2] and len(made.kept) == 1


def test_samples_of_another_policy_version_stop_the_run():
    made = collector([UNEQUAL] * 3)
    made.fleet.served = 4
    with pytest.raises(RunError, match=r"policy versions \[\(4, 4\)\] where all should be of version 0"):
        made.next(1, {})


FAILS = Status.ABORTED  # what the reward of this file cannot judge


def odd_one_fails(sample):
    assert sample.status is not FAILS, "an odd one"
    return float(sample.status is COMPLETED)


ODD = {"odd": {"function": "test_collect:odd_one_fails"}}


def test_a_sample_whose_reward_failed_leaves_a_smaller_group():
    rewards = scorer(ODD, on_error="drop_sample", max_error_ratio=0.5)
    groups = [(FAILS, COMPLETED), UNEQUAL, (FAILS, FAILS)]
    made = collector(groups, rewards, dynamic_sampling=None)
    samples, generated, metrics = made.next(1, {})
    assert group_ids(samples) == [0, 1, 1] and [sample.index for sample in samples] == [0, 1, 2]
    assert [sample.group_id for sample, _ in made.failed] == [0, 2, 2] and "an odd one" in made.failed[0][1]
    assert metrics["reward/errors"] == 3 and metrics["reward/mean"] == pytest.approx(2 / 3)


def test_dynamic_sampling_replaces_what_failed():
    rewards = scorer(ODD, on_error="drop_group", max_error_ratio=0.9)
    groups = [(FAILS, COMPLETED), UNEQUAL, (FAILS, TRUNCATED)] + [UNEQUAL] * 3
    samples, generated, metrics = collector(groups, rewards).next(1, {})
    assert group_ids(samples) == [1, 1, 3, 3, 4, 4] and metrics["dynamic_sampling/rounds"] == 2
    assert metrics["reward/errors"] == 2 and metrics["reward/dropped_samples"] == 4
    assert metrics["dynamic_sampling/generated_groups"] == 4


def test_a_round_of_failures_stops_the_run():
    rewards = scorer(ODD, on_error="drop_group", max_error_ratio=0.9)
    with pytest.raises(RunError, match="no sample of the round has a reward"):
        collector([(FAILS, COMPLETED)] * 3, rewards, dynamic_sampling=None).next(1, {})


def test_distillation_needs_no_reward():
    algorithm = {"name": "distillation", "dynamic_sampling": None, "reward": None}
    samples, _, metrics = collector([EQUAL] * 3, **algorithm).next(1, {})
    assert samples[0].reward is None and "reward/mean" not in metrics and metrics["response/truncated_ratio"] == 0
