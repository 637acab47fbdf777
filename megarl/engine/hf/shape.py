"""The HF config.json as the few numbers and switches that building and converting a model need."""

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's: see `megarl.engine.modules.inverse_frequencies`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    old_context: int


@dataclass(frozen=True)
class ModelShape:
    """What of an HF config decides the shapes; `hf` keeps the whole file."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    hf: dict
    num_experts: int = 0  # per layer; 0: dense
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0  # of one expert

    @classmethod
    def read(cls, model_path: str | Path) -> "ModelShape":
        """Raises ConfigError where config.json is missing, or names a family or a variant that is not supported."""
        file = Path(model_path) / "config.json"
        if not file.is_file():
            raise ConfigError(f"model.path: {file} does not exist")
        return cls.from_hf(json.loads(file.read_text()), where=str(file))

    @classmethod
    def from_hf(cls, hf: dict, where: str = "config.json") -> "ModelShape":
        from megarl.engine.hf import FAMILIES

        family = hf.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                f"{where}: model_type {family!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
            )
        if hf.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"{where}: hidden_act {hf['hidden_act']!r} is not supported; supported: silu")
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        if (rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ConfigError(f"{where}: a partial_rotary_factor below 1 is not supported")
        return cls(
            family=family,
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_hidden_size=hf["intermediate_size"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            vocab_size=hf["vocab_size"],
            tied=hf.get("tie_word_embeddings", False),
            rms_norm_eps=hf["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(rope, where),
            max_positions=hf["max_position_embeddings"],
            hf=hf,
            num_experts=hf.get("num_experts") or hf.get("num_local_experts", 0),  # released files; transformers 5
            experts_per_token=hf.get("num_experts_per_tok", 0),
            moe_ffn_hidden_size=hf.get("moe_intermediate_size", 0),
        )


def _rope_scaling(rope: dict, where: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{where}: rope scaling {rope} is not supported; supported: none, or rope_type llama3")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        old_context=rope["original_max_position_embeddings"],
    )
