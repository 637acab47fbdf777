"""What the parts of an algorithm allow, and what a preset stands for."""

import json
from pathlib import Path

import pytest
from config_folder import QWEN_0_5B, folder, only, refusal  # noqa: F401

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.config import describe, load
from megarl.config_algorithm import AlgorithmConfig
from megarl.presets import PAIRS, PRESETS, USUAL_CLIPS

PPO = ("algorithm.name=ppo", "roles.critic={}")
DISTILLATION = ("algorithm.name=distillation", "roles.teacher={path: model}")


GDPO = ("algorithm.name=gdpo", "algorithm.reward={gsm8k: 1.0, completed: 0.1}")
NEEDED = {"ppo": PPO[1:], "distillation": DISTILLATION[1:], "gdpo": GDPO[1:]}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_its_parts_exist_and_its_description_loads_again(folder, name):
    config = load("base.yaml", [f"algorithm.name={name}", *NEEDED.get(name, ())])
    algorithm = config.algorithm
    assert algorithm.advantage in ADVANTAGES and algorithm.policy_loss in POLICY_LOSSES
    assert algorithm.has_pairs == (name in PREFERENCE_LOSSES) == (name in PAIRS)
    assert not set(PRESETS[name]) - set(AlgorithmConfig.model_fields)
    assert (
        algorithm.policy_loss not in USUAL_CLIPS
        or algorithm.policy_loss == "ppo"
        or ((algorithm.clip_low, algorithm.clip_high) == USUAL_CLIPS[algorithm.policy_loss])
    )
    text = describe(config)
    (folder / "again.yaml").write_text(text)
    assert load("again.yaml") == config
    assert f"# algorithm           {name}\n" in text


def test_a_preset_fills_what_is_not_given_and_the_description_loads_again(folder):
    config = load("base.yaml", ["algorithm.name=dapo", "algorithm.clip_low=0.1", "algorithm.overlong=null"])
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss_aggregation) == (0.1, 0.28, "token_mean")
    assert algorithm.dynamic_sampling.max_rounds == 10 and algorithm.overlong is None
    text = describe(config)
    (folder / "again.yaml").write_text(text)
    assert load("again.yaml").algorithm == algorithm
    assert "# algorithm           dapo, but for overlong, clip_low\n" in text
    assert "# policy loss         ppo, clip 0.1 below and 0.28 above, token_mean" in text
    assert "# tokens per round    at most 196,608 (1,536 per sample)" in text


def parts(*overrides: str) -> str:
    """The comments of the description, a line each, single-spaced."""
    lines = describe(load("base.yaml", list(overrides))).splitlines()
    return "\n".join(" ".join(line[2:].split()) for line in lines if line.startswith("# "))


def test_the_description_names_the_active_parts_and_no_other(folder):
    given = [*PPO, "algorithm.kl_coefficient=0.01", "algorithm.kl_target=0.02", "algorithm.kl_horizon=1000",
             "algorithm.entropy_coefficient=0.003", "algorithm.off_policy={kind: icepop, low: 0.5, veto: 1e-4}",
             "roles.reference={refresh_every: 5, ema_decay: 0.9}", "algorithm.critic_warmup_steps=3"]  # fmt: skip
    text = parts(*given)
    for line in (
        "algorithm ppo, but for entropy_coefficient, off_policy, kl_coefficient, kl_target, kl_horizon, "
        "critic_warmup_steps",
        "advantage gae, gamma 1, lambda 0.95, whitened over the step",
        "KL 0.01 k1 in the reward, adapted to 0.02 nats per token over 1000 samples",
        "entropy bonus 0.003",
        "off-policy icepop within [0.5, 2], veto below 0.0001",
        "critic value clip 0.2, alone for 3 steps, from model",
        "reference the policy, every 5 steps, averaged with decay 0.9",
    ):
        assert line in text.splitlines()
    assert "overlong" not in text and "dynamic" not in text and "teacher" not in text and "warm start" not in text
    assert "critic value clip 0.2, from model" in parts(*PPO) and "shuffled" not in text


def test_the_description_says_what_is_only_logged_and_where_a_run_starts(folder):
    text = parts("warm_start={data: train.jsonl, steps: 40}", "debug.shuffle_rewards=true")
    for line in ("algorithm grpo", "warm start 40 steps of 64 rows of train.jsonl", "reward gsm8k"):
        assert line in text.splitlines()
    assert "control rewards are shuffled" in text
    assert "reference the policy before RL, only logged" in text
    assert "reward gsm8k, only logged" in parts(*DISTILLATION, "algorithm.reward=gsm8k")
    assert "algorithm rloo, but for advantage, clip_high\n" in parts(
        "algorithm.name=rloo", "algorithm.advantage=opo", "algorithm.clip_high=0.3", "algorithm.prompts_per_step=8"
    )


def test_the_description_of_supervised_runs_is_short(folder):
    assert "loss negative log-likelihood, token_mean\n" in parts("algorithm.name=sft")
    assert "rollout" not in parts("algorithm.name=sft") and "reference" not in parts("algorithm.name=sft")
    constant = parts("algorithm.name=sft", "algorithm.loss_aggregation=constant", "algorithm.aggregation_length=100")
    assert "loss negative log-likelihood, constant of 100 tokens\n" in constant
    assert "loss dpo, beta 0.1\nreference the model it starts from\n" in parts("algorithm.name=dpo")
    smoothed = parts("algorithm.name=dpo", "algorithm.preference.label_smoothing=0.2")
    assert "algorithm dpo, but for preference\nloss dpo, beta 0.1, label smoothing 0.2" in smoothed
    assert "loss Bradley-Terry\n" in parts("algorithm.name=reward_model")


SFT, DPO, IPO, REWARD_MODEL = (f"algorithm.name={name}" for name in ("sft", "dpo", "ipo", "reward_model"))
BASELINE, PLUS_PLUS = "algorithm.name=reinforce_plus_plus_baseline", "algorithm.name=reinforce_plus_plus"
KL, WHITEN = "algorithm.kl_coefficient=0.1", "algorithm.whiten_rewards=true"
REFUSED = {  # overrides -> what the one line says
    ("algorithm.advantage=gae",): "roles.critic: null, but algorithm.advantage: gae needs a critic; give roles.critic",
    ("roles.critic={}",): "given, but algorithm.advantage: grpo trains no critic; valid: null, or algorithm.name: ppo",
    (*PPO, "algorithm.advantage=rloo", "algorithm.group_size=4"): "rloo trains no critic; valid: null, or "
    "algorithm.advantage: gae",
    ("algorithm.value_clip=0.1",): "only algorithm.advantage: gae reads it, and that is grpo; valid: 0.2",
    ("algorithm.critic_warmup_steps=1",): "only algorithm.advantage: gae reads it, and that is grpo; valid: 0",
    ("algorithm.gae={gamma: 0.9}",): "algorithm.gae.gamma: given 0.9, but only algorithm.advantage: gae reads it",
    (*PPO, "algorithm.gae.length_adaptive_alpha=0.05"): "algorithm.gae.lam is 0.95: it is one or the other",
    (*PPO, "algorithm.gae.lam=null"): "so is algorithm.gae.length_adaptive_alpha: one of them is needed",
    (*PPO, "algorithm.critic_warmup_steps=95", "roles.actor.optimizer.warmup_steps=8"):
        "would not be reached in trainer.steps - algorithm.critic_warmup_steps = 5",
    (*PPO, "algorithm.critic_warmup_steps=100"): "in trainer.steps = 100 the policy would never be trained; at most 99",
    (*PPO, "roles.critic.path=nowhere"): "no such folder: nowhere",
    (*PPO, "roles.critic.gpus_per_node=8", "algorithm.mini_batch_size=4"): "fewer than the 8 data-parallel ranks "
    "(roles.critic",
    ("algorithm.kl_coefficient=-0.1",): "given -0.1 (a number), allowed: a number >= 0",
    ("algorithm.entropy_coefficient=-1",): "given -1 (a whole number), allowed: a number >= 0",
    (KL, "algorithm.kl_estimator=k1"): "in the loss its gradient is 0 in the mean",
    ("algorithm.name=rloo", KL, "algorithm.kl_importance_weighted=true"): "the samples are the policy's own",
    ("algorithm.kl_estimator=k2",): "given k2, but algorithm.kl_coefficient is 0: there is no KL term; valid: k3",
    (KL, "algorithm.kl_target=0.1"): "given 0.1, but algorithm.kl_horizon is null: give both",
    (KL, "algorithm.kl_horizon=1000"): "given 1000, but algorithm.kl_target is null: give both",
    (KL, "algorithm.kl_target=0.1", "algorithm.kl_horizon=25"): "could fall to 0 in one; at least 26",
    ("roles.reference={enabled: false, refresh_every: 2}",): "given 2, but roles.reference.enabled is false; valid: 0",
    ("roles.reference.refresh_every=101",): "given 101, but trainer.steps is 100; valid: 0 (never), or 1 to 100",
    ("roles.reference.ema_decay=0.9",): "roles.reference.refresh_every is 0: there is no refresh",
    ("algorithm.off_policy={}", "algorithm.old_logprobs=rollout"): "nothing is left to correct",
    ("algorithm.off_policy={kind: icepop}",): "off_policy.low: 0, but icepop is a band with two sides; usual: low 0.5",
    ("algorithm.off_policy={kind: geometric}",): "off_policy.high: 2, but geometric compares a sequence's mean ratio",
    ("algorithm.off_policy={kind: geometric, high: 1.2}",): "at most 1.1, usual: low 0.99 with high 1.01",
    ("rollout.logprob_diff_limit=0.1", "algorithm.old_logprobs=rollout"): "given 0.1, but with algorithm.old_logprobs: "
    "rollout the trainer scores nothing",
    ("algorithm.name=cispo", "algorithm.dual_clip=2.0"):
        "only algorithm.policy_loss: dual_clip reads it, and that is cispo",
    ("algorithm.policy_loss=sapo", "algorithm.clip_high=0.3"):
        "only algorithm.policy_loss: ppo or dual_clip or gspo or "
    "cispo reads it",
    ("algorithm.tau_negative=2.0",): "only algorithm.policy_loss: sapo reads it, and that is ppo; valid: 1.05",
    ("algorithm.name=cispo", "algorithm.policy_loss=ppo"):
        "given ppo with clip_low 1 and clip_high 4, but these are the "
    "clips of algorithm.name: cispo for cispo; usual for ppo: clip_low 0.2, clip_high 0.2",
    ("algorithm.name=gspo", "algorithm.policy_loss=dual_clip"): "usual for dual_clip: clip_low 0.2, clip_high 0.2",
    ("algorithm.name=dapo", "algorithm.policy_loss=cispo"): "usual for cispo: clip_low 1, clip_high 4",
    ("algorithm.name=cispo", "algorithm.policy_loss=gspo"):
        "it clips a sequence's mean ratio, of which 4 stops nothing",
    ("algorithm.reward=null",): "given null, but algorithm.advantage: grpo is made of rewards",
    ("algorithm.reward={gsm8k: 1.0, lenght: 1.0}",): "given 'lenght', valid: code, completed, ",
    ("algorithm.reward={gsm8k: 0.0}",): "given {gsm8k: 0.0}: no reward has a weight; valid:",
    ("algorithm.reward=3",): "given 3 (a whole number), allowed: a name, or names with a number or {function, weight,",
    ("algorithm.reward={gsm8k: .nan}",): "algorithm.reward.gsm8k: given .nan (a number), allowed: a finite number",
    ("algorithm.name=gdpo",): "given gsm8k, but gdpo wants several rewards by name with their weights: {gsm8k: 1.0,",
    ("algorithm.name=distillation", "algorithm.advantage=gdpo"): "given null, but gdpo wants several rewards by name",
    (*GDPO, WHITEN): "gdpo reads the parts of a reward, not their sum; valid: false",
    (WHITEN,): "grpo divides by a standard deviation itself: it changes nothing",
    (WHITEN, KL): "grpo divides by a standard deviation itself: it changes nothing",
    (WHITEN, BASELINE): "reinforce_plus_plus_baseline divides by a standard deviation itself",
    (WHITEN, PLUS_PLUS): "reinforce_plus_plus divides by a standard deviation itself",
    (PLUS_PLUS, "algorithm.whiten_advantages=true"): "reinforce_plus_plus whitens them itself",
    (*PPO, "algorithm.group_size=1", "algorithm.dynamic_sampling={}"): "unequal rewards, and group_size is 1",
    ("algorithm.dynamic_sampling={prompts_per_round: 17}",): "a round has at most algorithm.prompts_per_step = 16",
    ("algorithm.overlong={buffer_tokens: 600}",): "it is the end of rollout.sampling.max_new_tokens = 512; at most 512",
    ("algorithm.overlong={penalty: 0.0}",): "given with penalty 0 and filter false: it does nothing",
    ("algorithm.overlong={penalty: 0.0, filter: true, buffer_tokens: 10}",): "given 10, but algorithm.overlong.penalty "
    "is 0; valid: null",
    ("algorithm.name=distillation",): "distillation needs a teacher; give roles.teacher: {path: FOLDER}",
    (*DISTILLATION, "rollout.sampling.temperature=0.7"): "the teacher's servers score at temperature 1",
    (*DISTILLATION, "algorithm.dynamic_sampling={}"): "distillation has no use for rewards",
    (*DISTILLATION, "algorithm.advantage=grpo", "algorithm.reward=gsm8k"): "grpo has no teacher; valid: null, or "
    "algorithm.advantage: distillation",
    (*DISTILLATION, "data.validation=train.jsonl"): "data.validation=train.jsonl: given, but algorithm.reward is null, "
    "and a validation scores the responses to the held-out prompts; valid: null, or algorithm.reward, which is then",
    (*DISTILLATION, "debug.shuffle_rewards=true"):
        "distillation learns from the teacher's log-probs alone; valid: false",
    ("roles.teacher={path: model}",): "algorithm.advantage: grpo has no teacher; valid: null, or algorithm.name: "
    "distillation",
    ("algorithm.name=distillation", "roles.teacher={path: nowhere}"): "no such folder: nowhere",
    ("algorithm.preference={beta: 0.2}",):
        "algorithm.preference.beta: given 0.2, but only algorithm.name: dpo or ipo or "
    "reward_model reads it, and that is grpo; valid: 0.1",
    ("data.chosen_key=a",): "given a, but only algorithm.name: dpo or ipo or reward_model reads it; valid: chosen",
    ("data.response_key=a",): "given a, but only warm_start.data and algorithm.name: sft read it; valid: response",
    ("data.answer_key=prompt",): "given prompt, which data.prompt_key names already; valid: another column",
    ("data.response_key=prompt", "warm_start.data=train.jsonl"): "given prompt, which data.prompt_key names already",
    ("warm_start.steps=50",): "given 50, but warm_start.data is null: there is no warm start; valid: 600",
    ("warm_start.optimizer.learning_rate=1e-4",):
        "optimizer.learning_rate=1e-4: given 0.0001, but warm_start.data is null",
    ("trainer.evaluate_every=10",): "given 10, but data.validation is null: there are no held-out rows; valid: 0",
    (SFT, "trainer.evaluate_prompts=10"): "given 10, but data.validation is null: there are no held-out rows",
    # on rows of responses
    (IPO, "algorithm.preference.label_smoothing=0.1"): "only algorithm.name: dpo reads it, and that is ipo; valid: 0.0",
    (REWARD_MODEL, "algorithm.preference={beta: 0.2}"):
        "preference.beta: given 0.2, but only algorithm.name: dpo or ipo",
    (SFT, "algorithm.preference={beta: 0.2}"):
        "preference.beta: given 0.2, but algorithm.name: sft learns from the rows",
    (DPO, "algorithm.group_size=8"): "for dpo a row of data.train is 2 sample(s); valid: 2",
    (SFT, "data.overlong=truncate_left"): "given truncate_left, but with algorithm.name: sft a row that is too long is",
    (SFT, "algorithm.group_size=8"): "for sft a row of data.train is 1 sample(s); valid: 1",
    (DPO, "algorithm.prompts_per_step=3", "algorithm.mini_batch_size=3"): "given 3, but algorithm.prompts_per_step * "
    "algorithm.group_size = 3 * 2 = 6 is to be divided into whole pairs; nearest valid mini_batch_size: 2, 6",
    (DPO, "algorithm.prompts_per_step=9", "algorithm.mini_batch_size=4"): "9 * 2 = 18 is not a multiple of it; nearest "
    "valid mini_batch_size: 2, 6; nearest valid prompts_per_step: 8, 10",
    (DPO, "algorithm.prompts_per_step=3", "algorithm.mini_batch_size=2", "roles.actor.gpus_per_node=2"):
        "an update has "
    "1 pairs (prompts_per_step 3, group_size 2, mini_batch_size 2), fewer than the 2 data-parallel ranks",
    (DPO, "algorithm.prompts_per_step=6", "algorithm.mini_batch_size=5", "roles.actor.gpus_per_node=2"):
        "nearest valid "
    "mini_batch_size: 4, 6",
    (DPO, "roles.reference.enabled=false"): "dpo compares the policy with the reference; valid: true",
    (DPO, "roles.reference.refresh_every=2"): "algorithm.name: dpo keeps its reference; valid: 0",
    (SFT, "roles.reference.refresh_every=2"): "algorithm.name: sft has no reference; valid: 0",
    (SFT, "algorithm.clip_low=0.1"):
        "given 0.1, but algorithm.name: sft learns from the rows of data.train alone; valid: 0.2",
    (SFT, "algorithm.reward=gsm8k"): "given {gsm8k: 1.0}, but algorithm.name: sft learns from the rows of data.train alone",
    (SFT, "algorithm.gae={gamma: 0.9}"): "algorithm.gae.gamma: given 0.9, but algorithm.name: sft learns from the rows",
    (SFT, "algorithm.kl_estimator=k1"): "given k1, but algorithm.name: sft learns from the rows of data.train alone",
    (DPO, "algorithm.whiten_rewards=true"):
        "given true, but algorithm.name: dpo learns from the rows of data.train alone",
    (SFT, "algorithm.epochs=2"): "given 2, but with algorithm.name: sft trainer.steps counts the steps",
    (SFT, "algorithm.loss_aggregation=constant"): "aggregation_length: null, but without servers there is no rollout",
    (SFT, "algorithm.aggregation_length=9"):
        "only algorithm.loss_aggregation: constant reads it, and that is token_mean",
    (DPO, "algorithm.aggregation_length=9"):
        "given 9, but algorithm.name: dpo learns from the rows of data.train alone",
    (SFT, "placement=colocated"): "given colocated, but algorithm.name: sft starts no servers; valid: disaggregated",
    (SFT, "rollout.sampling.top_p=0.9"): "given 0.9, but algorithm.name: sft starts no servers; valid: 1.0",
    (SFT, "rollout.servers=2"): "given 2, but algorithm.name: sft starts no servers; valid: 1",
    (SFT, "sync.bucket_mb=8"): "given 8, but algorithm.name: sft starts no servers; valid: 1024",
    (SFT, "debug.sync_checksum=true"): "given true, but algorithm.name: sft starts no servers; valid: false",
    (SFT, "debug.shuffle_rewards=true"): "given true, but algorithm.name: sft has no rewards; valid: false",
    (SFT, "trainer.num_logged_samples=8"): "given 8, but algorithm.name: sft generates no samples; valid: 4",
    (SFT, "roles.actor.offload=all"): "given all, but with algorithm.name: sft nothing else needs the actor's GPUs",
    (SFT, "roles.teacher={path: model}"): "given {path: model}, but algorithm.name: sft has no teacher; valid: null",
    (SFT, "data.answer_key=a"): "given a, but algorithm.name: sft has no rewards; valid: answer",
    (SFT, "data.chosen_key=a"): "given a, but algorithm.name: sft has rows of one response; valid: chosen",
    (DPO, "data.response_key=a"): "given a, but algorithm.name: dpo has rows of a pair; valid: response",
    (DPO, "data.chosen_key=a", "data.rejected_key=a"): "given a, which data.chosen_key names already",
    (SFT, "data.response_key=prompt"): "given prompt, which data.prompt_key names already",
    (DPO, "warm_start.data=train.jsonl"):
        "given train.jsonl, but algorithm.name: dpo has none: run algorithm.name: sft "
    "first and start from its export (model.path); valid: null",
    (SFT, "warm_start.data=train.jsonl"): "algorithm.name: sft is no start of something: give its rows as data.train",
    (REWARD_MODEL, "roles.critic={}"): "given {}, but algorithm.name: reward_model trains no critic; valid: null",
}  # fmt: skip


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_does_not_go_together_is_refused_with_the_reason(folder, overrides):
    line = only(refusal(*overrides))
    assert REFUSED[overrides] in line
    for word in ("None", "True", "False"):
        assert word not in line


def test_all_of_it_is_told_at_once(folder):
    given = ["algorithm.kl_target=0.1", "algorithm.gae.lam=null", "algorithm.overlong={penalty: 0.0}"]
    assert len(refusal("algorithm.name=ppo", *given)) == 4


def test_a_wrong_name_is_told_alone_with_the_nearest_one(folder):
    given = ["roles.critic={}", "algorithm.gae.lam=1.0", "algorithm.clip_low=1.0", "rollout.sampling.top_k=5",
             "data.max_prompt_tokens=40000", "algorithm.policy_loss=gspo", "warm_start.steps=5"]  # fmt: skip
    for name, meant in {
        "ppoo": "ppo", "PPO": "ppo", "reinforce++": "reinforce_plus_plus", "Dr.GRPO": "dr_grpo", "grop": "grpo",
        "'REINFORCE++-baseline'": "reinforce_plus_plus_baseline",
        "rein": "reinforce_plus_plus or reinforce_plus_plus_baseline",
    }.items():  # fmt: skip
        assert only(refusal(f"algorithm.name={name}", *given)).endswith(f"; did you mean {meant}?")
    assert "did you mean" not in only(refusal("algorithm.name=lora"))
    assert only(refusal("algorithm.policy_loss=sappo", "algorithm.tau_negative=2.0")).endswith("; did you mean sapo?")


def test_a_classifier_is_no_language_model(folder):
    Path("model/config.json").write_text(json.dumps(QWEN_0_5B | {"architectures": ["Qwen2ForSequenceClassification"]}))
    for name in ("grpo", "sft", "dpo"):
        line = only(refusal(f"algorithm.name={name}"))
        assert "model.path: config.json names Qwen2ForSequenceClassification: its score head would be dropped" in line
    load("base.yaml", ["algorithm.name=reward_model"])
    Path("policy").mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / "policy" / name).touch()
    (folder / "policy/config.json").write_text(json.dumps(QWEN_0_5B | {"architectures": ["Qwen2ForCausalLM"]}))
    load("base.yaml", ["model.path=policy", *PPO, "roles.critic.path=model"])
    line = only(refusal("model.path=policy", *DISTILLATION))
    assert "roles.teacher={path: model}: roles.teacher.path: config.json names Qwen2ForSequenceClassification" in line


def test_parts_that_go_together_are_accepted(folder):
    for overrides in (
        ("algorithm.policy_loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"),
        ("algorithm.old_logprobs=rollout",),
        ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_importance_weighted=true"),
        (*PPO, "algorithm.group_size=1", "algorithm.prompts_per_step=64"),
        (*PPO, "algorithm.gae={lam: null, length_adaptive_alpha: 0.05, returns_lam: 1.0}"),
        (*DISTILLATION, "algorithm.reward=gsm8k"),
        ("algorithm.name=dapo", "algorithm.policy_loss=dual_clip"),
        ("algorithm.name=cispo", "algorithm.policy_loss=sapo"),
        ("algorithm.off_policy={kind: icepop, low: 0.5, high: 5.0}",),
        ("algorithm.off_policy={kind: geometric, low: 0.99, high: 1.01}",),
        (WHITEN, KL, "algorithm.kl_in=reward"),
        (WHITEN, KL, PLUS_PLUS),
        (WHITEN, KL, BASELINE, "algorithm.kl_in=reward"),
        (WHITEN, "algorithm.name=rloo"),
        (WHITEN, "algorithm.normalize_by_std=false"),
        ("roles.reference.refresh_every=100",),
        ("warm_start.data=train.jsonl", "data.response_key=answer"),
        (SFT, "algorithm.loss_aggregation=constant", "algorithm.aggregation_length=100"),
        (SFT, "roles.reference.enabled=false", "roles.actor.offload=none"),
        (SFT, "data.validation=train.jsonl", "trainer.evaluate_every=10"),
        (DPO, "algorithm.preference={beta: 0.3, label_smoothing: 0.1}"),
        (DPO, "algorithm.prompts_per_step=9", "algorithm.mini_batch_size=6"),
        (DPO, "algorithm.prompts_per_step=10", "algorithm.mini_batch_size=4"),
        (REWARD_MODEL, "algorithm.preference.center=0.1"),
    ):
        load("base.yaml", list(overrides))
