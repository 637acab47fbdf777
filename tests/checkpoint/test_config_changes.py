"""Which keys of a config may change between two parts of a run."""

import copy

import pytest
from saving import config_of

from megarl.checkpoint.config_changes import FREE, changes, read
from megarl.config import Config
from megarl.config_errors import covers, field_at, known_keys, section_of
from megarl.config_file import dump

OPTIMIZER = ("learning_rate", "betas", "epsilon", "weight_decay", "clip_grad", "warmup_steps", "schedule")
OPTIMIZER += ("decay_from", "final_fraction")
LORA = ("rank", "alpha", "targets")
# A new key of the schema is either free, by FREE, or comes in here: both are a decision.
COUNTS = {
    "": ("seed",),
    "toy": ("folder", "seed"),
    "model": ("path", "dtype"),
    "data": ("train", "prompt_key", "answer_key", "tools_key", "response_key", "chosen_key", "rejected_key")
    + ("system_prompt", "chat_template", "max_prompt_tokens", "overlong"),
    "warm_start": ("data", "steps", "batch_size"),
    "warm_start.optimizer": OPTIMIZER,
    "algorithm": ("name", "prompts_per_step", "group_size", "mini_batch_size", "epochs", "reward", "advantage")
    + ("normalize_by_std", "whiten_rewards", "whiten_advantages", "policy_loss", "clip_low", "clip_high", "dual_clip")
    + ("tau_positive", "tau_negative", "loss_aggregation", "aggregation_length", "entropy_coefficient")
    + ("old_logprobs", "kl_coefficient", "kl_in", "kl_estimator", "kl_importance_weighted", "kl_target", "kl_horizon")
    + ("value_clip", "critic_warmup_steps"),
    "algorithm.gae": ("gamma", "lam", "length_adaptive_alpha", "returns_lam"),
    "algorithm.dynamic_sampling": ("max_rounds", "prompts_per_round"),
    "algorithm.overlong": ("buffer_tokens", "penalty", "filter"),
    "algorithm.off_policy": ("kind", "low", "high", "veto"),
    "algorithm.preference": ("beta", "label_smoothing", "center"),
    "rewards": ("on_error", "max_error_ratio", "timeout_s", "batch_timeout_s"),
    "roles.actor.lora": LORA,
    "roles.actor.optimizer": OPTIMIZER,
    "roles.critic": ("path", "value_head_std", "value_head_bias"),
    "roles.critic.lora": LORA,
    "roles.critic.optimizer": OPTIMIZER,
    "roles.reference": ("enabled", "refresh_every", "ema_decay"),
    "roles.teacher": ("path",),
    "roles.reward_model": ("path",),
    "roles.reward_server": ("path",),
    "rollout": ("deterministic", "replay"),
    "rollout.sampling": ("temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos"),
    "trainer": ("steps",),
    "debug": ("shuffle_rewards",),
}


def saved(config: Config) -> dict:
    return config.model_dump(mode="json")


def test_every_key_of_the_schema_is_free_or_counts():
    values = {key for key in known_keys(Config) if section_of(field_at(Config, key).annotation) is None}
    counting = {f"{section}.{name}".lstrip(".") for section, names in COUNTS.items() for name in names}
    assert {key for key in values if not covers(FREE, key)} == counting


def test_free_keys_are_keys():
    unknown = [key for key in FREE if field_at(Config, key) is None]
    assert unknown in ([], ["evaluation"])


@pytest.mark.parametrize(
    "sections",
    [
        {"name": "y", "run_directory": "/elsewhere", "device": "cuda", "placement": "colocated"},
        {"roles": {"actor": {"nodes": 2, "gpus_per_node": 8, "tensor_parallel": 4, "offload": "all"}}},
        {"roles": {"actor": {"recompute": "full", "max_tokens_per_gpu": 64, "overlap_grad_reduce": False}}},
        {"rollout": {"servers": 4, "tensor_parallel": 2, "server_args": {"mem_fraction_static": 0.5}}},
        {"checkpoint": {"keep_last": 3}, "trainer": {"save_every": 7, "early_stop": {}, "num_logged_samples": None}},
        {"data": {"train": "t", "validation": "v"}, "trainer": {"evaluate_every": 3, "evaluate_prompts": 9}},
        {"guards": {"kl": {"action": "stop", "high": 1.0}}, "sync": {"bucket_mb": 4}},
        {"cluster": {"call_timeout_s": 9.0}, "rollout": {"max_retries": 9}},
        {"rewards": {"num_workers": 3, "on_constant": "stop"}, "debug": {"sync_checksum": True}},
        {"trainer": {"steps": 7}},
    ],
)
def test_layout_cluster_and_what_watches_a_run_may_change(tmp_path, sections):
    assert changes(config_of(tmp_path, **sections), saved(config_of(tmp_path))) == []
    assert changes(config_of(tmp_path), saved(config_of(tmp_path, **sections))) == []


def test_servers_of_every_role_may_be_others(tmp_path):
    before, now = (
        {
            "teacher": {"path": "t", "servers": servers},
            "reward_server": {"path": "r", "server_args": {"mem_fraction_static": 0.1 * servers}},
            "reward_model": {"path": "r", "gpus_per_node": servers},
            "critic": {"gpus_per_node": servers},
        }
        for servers in (1, 2)
    )
    assert changes(config_of(tmp_path, roles=now), saved(config_of(tmp_path, roles=before))) == []


def test_all_that_is_learnt_otherwise_is_listed_at_once(tmp_path):
    before = config_of(tmp_path, seed=1, algorithm={"reward": {"gsm8k": 1.0}}, roles={"actor": {"lora": {"rank": 8}}})
    now = config_of(
        tmp_path,
        seed=2,
        algorithm={"reward": {"gsm8k": 0.5, "math": 1.0}, "group_size": 4, "dynamic_sampling": {}},
        rollout={"sampling": {"temperature": 0.7}, "servers": 3},
        roles={"actor": {"optimizer": {"betas": [0.9, 0.99]}, "nodes": 3}, "critic": {}},
    )
    lines = changes(now, saved(before))
    assert [line.partition(":")[0] for line in lines] == [
        "seed",
        "algorithm.group_size",
        "algorithm.reward.gsm8k",
        "algorithm.reward.math",
        "algorithm.dynamic_sampling",
        "roles.actor.lora",
        "roles.actor.optimizer.betas",
        "roles.critic",
        "rollout.sampling.temperature",
    ]
    assert lines[0] == "seed: 2, and 1 where it was saved"
    assert lines[6] == "roles.actor.optimizer.betas: [0.9, 0.99], and [0.9, 0.95] where it was saved"
    assert len(changes(before, saved(now))) == len(lines)


def test_a_reward_that_was_not_there_is_a_change_though_it_is_the_usual_one(tmp_path):
    rewards = ({"math": 1.0}, {"math": 1.0, "gsm8k": 1.0})
    before, now = (config_of(tmp_path, algorithm={"reward": reward}) for reward in rewards)
    assert changes(now, saved(before)) == ["algorithm.reward.gsm8k: 1.0, and null where it was saved"]
    assert changes(before, saved(now)) == ["algorithm.reward.gsm8k: null, and 1.0 where it was saved"]


def test_the_number_of_steps_may_change_where_no_rate_depends_on_it(tmp_path):
    def roles(actor, critic=None):
        return {"actor": {"optimizer": {"schedule": actor}}} | (
            {"critic": {"optimizer": {"schedule": critic}}} if critic else {}
        )

    for actor, critic, is_free in (
        ("constant", None, True), ("constant", "constant", True), ("cosine", None, False), ("constant", "linear", False)
    ):  # fmt: skip
        before, now = (config_of(tmp_path, roles=roles(actor, critic), trainer={"steps": steps}) for steps in (10, 20))
        expected = [] if is_free else ["trainer.steps: 20, and 10 where it was saved"]
        assert changes(now, saved(before)) == expected
    before = config_of(tmp_path, roles=roles("cosine"), trainer={"steps": 10})
    now = config_of(tmp_path, roles=roles("constant"), trainer={"steps": 20})
    assert changes(now, saved(before)) == ["roles.actor.optimizer.schedule: constant, and cosine where it was saved"]


def test_what_the_warm_start_was_counts(tmp_path):
    """It is over, but the model that goes on is the one that it made."""
    before, now = (config_of(tmp_path, warm_start={"data": "w", "steps": steps}) for steps in (10, 20))
    assert changes(now, saved(before)) == ["warm_start.steps: 20, and 10 where it was saved"]


def test_keys_that_an_earlier_config_lacks_were_as_the_schema_has_them(tmp_path):
    """Also where the schema has no section, and the config has one."""
    sections = {
        "algorithm": {"name": "dapo", "off_policy": {"high": 3.0}},
        "roles": {"critic": {"gpus_per_node": 2}, "actor": {"lora": {}}},
        "rollout": {"sampling": {"temperature": 0.5}},
    }
    now = config_of(tmp_path, **sections)
    earlier = copy.deepcopy(saved(now))
    for section, name in (
        ("algorithm", "clip_high"),  # the preset's
        ("algorithm.off_policy", "kind"),
        ("algorithm.overlong", "filter"),
        ("roles.critic", "value_head_std"),
        ("roles.critic", "optimizer"),
        ("roles.actor.lora", "alpha"),
        ("roles.actor.optimizer", "betas"),
        ("rollout.sampling", "top_k"),
        ("rollout", "deterministic"),
        ("debug", "shuffle_rewards"),
    ):
        tree = earlier
        for key in section.split("."):
            tree = tree[key]
        assert tree.pop(name) is not None
    del earlier["warm_start"], earlier["checkpoint"]
    assert changes(now, earlier) == []
    other = config_of(tmp_path, **(sections | {"algorithm": {"name": "dapo", "off_policy": {"kind": "icepop"}}}))
    expected = "algorithm.off_policy.kind: icepop, and token_tis where it was saved"
    assert expected in changes(other, earlier)


def test_a_key_that_is_no_more_is_a_change_unless_it_was_null(tmp_path):
    earlier = saved(config_of(tmp_path))
    earlier["algorithm"] |= {"old_trick": 3, "other_trick": None}
    earlier["old_section"] = {"a": 1}
    lines = changes(config_of(tmp_path), earlier)
    assert lines == [
        "algorithm.old_trick: null, and 3 where it was saved", "old_section: null, and {a: 1} where it was saved"
    ]  # fmt: skip


def test_a_resolved_config_is_read_back_as_it_was(tmp_path):
    """Words and numbers that YAML takes for something else among them."""
    rewards = {"math": 1e-7, "short": {"function": "length", "options": {"a": "no", "b": "1e6", "c": "2026-01-01"}}}
    sources = [{"path": "ü 1:30", "weight": 2.0}, {"name": "n", "weight": 1.0}]
    data = {"train": sources, "system_prompt": "a\n\u2028 b: #c"}
    config = config_of(tmp_path, algorithm={"reward": rewards}, data=data)
    (tmp_path / "config.yaml").write_text(dump(saved(config)), encoding="utf-8")
    assert read(tmp_path / "config.yaml") == saved(config) and changes(config, read(tmp_path / "config.yaml")) == []
