"""What the parts of an algorithm allow, and what a preset stands for."""

import pytest
from config_folder import folder, only, refusal  # noqa: F401

from megarl.algorithms import ADVANTAGES
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.config import describe, load
from megarl.config_algorithm import AlgorithmConfig
from megarl.presets import PAIRS, PRESETS

PPO = ("algorithm.name=ppo", "roles.critic={}")
DISTILLATION = ("algorithm.name=distillation", "roles.teacher={path: model}")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_loads_and_its_parts_exist(folder, name):
    more = {"ppo": PPO[1:], "distillation": DISTILLATION[1:], "gdpo": ("algorithm.reward={gsm8k: 1.0, completed: 0.1}",)}
    algorithm = load("base.yaml", [f"algorithm.name={name}", *more.get(name, ())]).algorithm
    assert algorithm.advantage in ADVANTAGES and algorithm.policy_loss in POLICY_LOSSES
    assert algorithm.has_pairs == (name in PREFERENCE_LOSSES) == (name in PAIRS)
    assert not set(PRESETS[name]) - set(AlgorithmConfig.model_fields)


def test_a_preset_fills_what_is_not_given_and_the_description_loads_again(folder):
    config = load("base.yaml", ["algorithm.name=dapo", "algorithm.clip_low=0.1", "algorithm.overlong=null"])
    algorithm = config.algorithm
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.loss_aggregation) == (0.1, 0.28, "token_mean")
    assert algorithm.dynamic_sampling.max_rounds == 10 and algorithm.overlong is None
    text = describe(config)
    (folder / "again.yaml").write_text(text)
    assert load("again.yaml").algorithm == algorithm
    assert "# policy loss         ppo, clip 0.1 below and 0.28 above, token_mean" in text


def test_the_description_names_the_active_parts_and_no_other(folder):
    given = [*PPO, "algorithm.kl_coefficient=0.01", "algorithm.kl_target=0.02", "algorithm.kl_horizon=1000",
             "algorithm.entropy_coefficient=0.003", "algorithm.off_policy={kind: icepop, low: 0.5, veto: 1e-4}",
             "roles.reference={refresh_every: 5, ema_decay: 0.9}", "algorithm.critic_warmup_steps=3"]  # fmt: skip
    lines = describe(load("base.yaml", given)).splitlines()
    text = "\n".join(" ".join(line[2:].split()) for line in lines if line.startswith("# "))
    for line in (
        "algorithm ppo",
        "advantage gae, gamma 1, lambda 0.95, whitened over the step",
        "KL 0.01 k1 in the reward, adapted to 0.02 nats per token over 1000 samples",
        "entropy bonus 0.003",
        "off-policy icepop within [0.5, 2], veto below 0.0001",
        "critic value loss with clip 0.2, alone for 3 steps, from model",
        "reference the policy, every 5 steps, averaged with decay 0.9",
    ):
        assert line in text
    assert "overlong" not in text and "dynamic" not in text and "teacher" not in text
    sft = describe(load("base.yaml", ["algorithm.name=sft"]))
    assert "# loss                negative log-likelihood, token_mean" in sft and "rollout " not in sft.partition("\n# ")[2]


REFUSED = {  # overrides -> what the one line says
    ("algorithm.advantage=gae",): "roles.critic: null, but algorithm.advantage: gae needs a critic; give roles.critic",
    ("roles.critic={}",): "given, but algorithm.advantage: grpo trains no critic; valid: null, or algorithm.name: ppo",
    ("algorithm.value_clip=0.1",): "only algorithm.advantage: gae reads it, and that is grpo",
    ("algorithm.critic_warmup_steps=1",): "only algorithm.advantage: gae reads it, and that is grpo",
    ("algorithm.gae={gamma: 0.9}",): "given {'gamma': 0.9}, but only algorithm.advantage: gae reads it",
    (*PPO, "algorithm.gae.length_adaptive_alpha=0.05"): "algorithm.gae.lam is 0.95: it is one or the other",
    (*PPO, "algorithm.gae.lam=null"): "so is algorithm.gae.length_adaptive_alpha: one of them is needed",
    (*PPO, "algorithm.critic_warmup_steps=100"): "in trainer.steps = 100 the policy would never be trained",
    (*PPO, "roles.critic.path=nowhere"): "no such folder: nowhere",
    (*PPO, "roles.critic.gpus_per_node=8", "algorithm.mini_batch_size=4"): "fewer than the 8 data-parallel ranks (roles.critic",
    ("algorithm.kl_coefficient=-0.1",): "given -0.1 (a number), allowed: a number >= 0",
    ("algorithm.entropy_coefficient=-1",): "given -1 (a whole number), allowed: a number >= 0",
    ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"): "in the loss its gradient is 0 in the mean",
    ("algorithm.name=rloo", "algorithm.kl_coefficient=0.1", "algorithm.kl_importance_weighted=true"): "the samples are the policy's own",
    ("algorithm.kl_target=0.1", "algorithm.kl_horizon=1000"): "algorithm.kl_coefficient is 0: there is no KL term",
    ("algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.1"): "with algorithm.kl_horizon None: the two go together",
    ("algorithm.kl_coefficient=0.1", "algorithm.kl_target=0.1", "algorithm.kl_horizon=25"): "could fall to 0 in one; at least 26",
    ("roles.reference={enabled: false, refresh_every: 2}",): "given 2, but roles.reference.enabled is false",
    ("roles.reference.ema_decay=0.9",): "roles.reference.refresh_every is 0: there is no refresh",
    ("algorithm.off_policy={}", "algorithm.old_logprobs=rollout"): "nothing is left to correct",
    ("algorithm.name=cispo", "algorithm.dual_clip=2.0"): "only algorithm.policy_loss: dual_clip reads it, and that is cispo",
    ("algorithm.policy_loss=sapo", "algorithm.clip_high=0.3"): "only algorithm.policy_loss: ppo or dual_clip or gspo or cispo reads it",
    ("algorithm.tau_negative=2.0",): "only algorithm.policy_loss: sapo reads it, and that is ppo",
    ("algorithm.reward=null",): "given null, but algorithm.advantage: grpo is made of rewards",
    ("algorithm.reward={gsm8k: 1.0, lenght: 1.0}",): "given 'lenght', valid: completed, gsm8k, last_integer",
    ("algorithm.reward={gsm8k: 0.0}",): "no reward has a weight",
    ("algorithm.reward=3",): "given 3 (a whole number), allowed: a string or a mapping, or null",
    ("algorithm.name=gdpo",): "gdpo wants rewards by name with their weights",
    ("algorithm.name=gdpo", "algorithm.reward={gsm8k: 1.0}", "algorithm.whiten_rewards=true"): "gdpo reads the parts of a reward",
    ("algorithm.whiten_rewards=true",): "grpo divides by the group's standard deviation anyway",
    ("algorithm.name=reinforce_plus_plus", "algorithm.whiten_advantages=true"): "reinforce_plus_plus whitens them itself",
    (*PPO, "algorithm.group_size=1", "algorithm.dynamic_sampling={}"): "looks for groups with unequal rewards, and group_size is 1",
    ("algorithm.dynamic_sampling={prompts_per_round: 17}",): "given 17, but a round has at most algorithm.prompts_per_step = 16",
    ("algorithm.overlong={buffer_tokens: 600}",): "it is the end of rollout.sampling.max_new_tokens = 512",
    ("algorithm.overlong={penalty: 0.0}",): "given with penalty 0 and filter false: it does nothing",
    ("algorithm.name=distillation",): "distillation needs a teacher; give roles.teacher: {path: FOLDER}",
    (*DISTILLATION, "rollout.sampling.temperature=0.7"): "the teacher's servers score at temperature 1",
    (*DISTILLATION, "algorithm.dynamic_sampling={}"): "distillation has no use for rewards",
    ("roles.teacher={path: model}",): "algorithm.name: grpo has no teacher",
    ("algorithm.name=distillation", "roles.teacher={path: nowhere}"): "no such folder: nowhere",
    ("algorithm.preference={beta: 0.2}",): "only algorithm.name: dpo or ipo or reward_model reads it, and that is grpo",
    ("algorithm.name=ipo", "algorithm.preference.label_smoothing=0.1"): "only algorithm.name: dpo reads it, and that is ipo",
    ("algorithm.name=dpo", "algorithm.group_size=8"): "for dpo a row of data.train is 2 sample(s); valid: 2",
    ("algorithm.name=dpo", "algorithm.prompts_per_step=3", "algorithm.mini_batch_size=3"): "are pairs; nearest valid: 2, 4",
    ("algorithm.name=dpo", "roles.reference.enabled=false"): "dpo compares the policy with the reference; valid: true",
    ("algorithm.name=dpo", "roles.reference.refresh_every=2"): "algorithm.name: dpo keeps its reference",
    ("algorithm.name=sft", "algorithm.clip_low=0.1"): "algorithm.name: sft learns from the rows of data.train alone",
    ("algorithm.name=sft", "algorithm.reward=gsm8k"): "algorithm.name: sft learns from the rows of data.train alone",
    ("algorithm.name=sft", "placement=colocated"): "algorithm.name: sft has no servers, rewards or warm start",
    ("algorithm.name=reward_model", "roles.critic={}"): "given, but algorithm.name: reward_model trains no critic",
}  # fmt: skip


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_does_not_go_together_is_refused_with_the_reason(folder, overrides):
    assert REFUSED[overrides] in refusal(*overrides)[0]


def test_all_of_it_is_told_at_once(folder):
    lines = refusal("algorithm.name=ppo", "algorithm.kl_target=0.1", "algorithm.gae.lam=null", "algorithm.overlong={penalty: 0.0}")
    assert len(lines) == 5


def test_parts_that_go_together_are_accepted(folder):
    for overrides in (
        ("algorithm.policy_loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"),
        ("algorithm.old_logprobs=rollout",),
        ("algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1", "algorithm.kl_importance_weighted=true"),
        (*PPO, "algorithm.group_size=1", "algorithm.prompts_per_step=64"),
        (*PPO, "algorithm.gae={lam: null, length_adaptive_alpha: 0.05, returns_lam: 1.0}"),
        (*DISTILLATION, "algorithm.reward=gsm8k"),
        ("algorithm.name=sft", "algorithm.loss_aggregation=constant", "algorithm.aggregation_length=100"),
        ("algorithm.name=dpo", "algorithm.preference={beta: 0.3, label_smoothing: 0.1}"),
    ):
        load("base.yaml", list(overrides))
