"""What `algorithm.name` stands for: the keys of AlgorithmConfig that differ from its defaults.

A preset holds what the paper's formulas say; sizes and learning rates are the user's. Each key can be set on its own
all the same. A new algorithm made of parts that exist is an entry here.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # from rewards, relative to a group
    "grpo": {"advantage": "grpo"},
    "dr_grpo": {"advantage": "dr_grpo", "loss_aggregation": "constant"},
    "rloo": {
        "advantage": "rloo",
        "loss_aggregation": "sequence_mean_token_sum",
        "kl_in": "reward",
        "kl_estimator": "k1",
    },
    "opo": {"advantage": "opo", "loss_aggregation": "sequence_mean_token_sum"},
    "reinforce_plus_plus": {"advantage": "reinforce_plus_plus", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_plus_plus_baseline": {"advantage": "reinforce_plus_plus_baseline", "kl_estimator": "k2"},
    "gdpo": {"advantage": "gdpo"},
    "gspo": {"advantage": "grpo", "policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {
        "advantage": "grpo",
        "policy_loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "loss_aggregation": "token_mean",
    },
    "sapo": {"advantage": "grpo", "policy_loss": "sapo"},
    "dapo": {
        "advantage": "grpo",
        "clip_high": 0.28,
        "loss_aggregation": "token_mean",
        "dynamic_sampling": {},
        "overlong": {},
    },
    # from rewards and a critic
    "ppo": {
        "advantage": "gae",
        "loss_aggregation": "token_mean",
        "kl_in": "reward",
        "kl_estimator": "k1",
        "whiten_advantages": True,
    },
    # from a teacher
    "distillation": {"advantage": "distillation", "loss_aggregation": "token_mean", "reward": None},
    # from responses that are there: no servers, no rewards; a row of the data is `group_size` samples
    "sft": {"group_size": 1, "loss_aggregation": "token_mean", "reward": None},
    "dpo": {"group_size": 2, "reward": None},
    "ipo": {"group_size": 2, "reward": None},
    "reward_model": {"group_size": 2, "reward": None},
}
PAIRS = ("dpo", "ipo", "reward_model")  # a row is a chosen and a rejected response
SUPERVISED = ("sft", *PAIRS)
WITH_REFERENCE = ("dpo", "ipo")  # of the supervised ones
GROUP_RELATIVE = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline", "gdpo")  # advantages within a group
USUAL_CLIPS = {  # policy loss -> (clip_low, clip_high)
    "ppo": (0.2, 0.2),
    "dual_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}


def with_preset(given: Any) -> Any:
    """The keys given, on top of those of the preset that they name."""
    name = given.get("name", "grpo") if isinstance(given, dict) else None
    return given if not isinstance(name, str) or name not in PRESETS else PRESETS[name] | given
