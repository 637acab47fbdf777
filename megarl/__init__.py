"""RL post-training of large language models: Megatron-Core engines, SGLang rollout servers, a Ray scheduler."""

__version__ = "0.1.0"
