"""LoRA's settings, and what they must fit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megarl.config_section import Section
from megarl.config_violation import Violation, in_yaml, listed
from megarl.engine.hf.shape import ModelShape

if TYPE_CHECKING:
    from megarl.config import Config

# Megatron's matrices and the projections that they are made of.
MATRICES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ("linear_qkv", "linear_proj")


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights (arXiv:2106.09685): W x + (alpha / rank) B A x, A and B being trained.

    Projections that are one matrix in Megatron share an adapter's A: q, k and v; gate and up. The usual learning rate is
    about ten times that of training all weights.
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    targets: list[Projection] | None = Field(
        None, min_length=1, description="null: all projections of the layers, without those of experts"
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def matrices(self, shape: ModelShape) -> list[str]:
        """Megatron's names of those that have an adapter."""
        possible = ATTENTION if shape.num_experts else MATRICES
        return [name for name in possible if self.targets is None or set(MATRICES[name]) <= set(self.targets)]

    def projections(self, shape: ModelShape) -> list[str]:
        """The same in Hugging Face's words."""
        return [projection for name in self.matrices(shape) for projection in MATRICES[name]]


def check_lora(config: "Config", name: str) -> Iterator[Violation]:
    """What needs no look at the model."""
    lora = config.roles.trained[name].lora
    targets = lora.targets or [] if lora else []
    keys = (f"roles.{name}.lora.targets",)
    if twice := sorted({target for target in targets if targets.count(target) > 1}):
        yield Violation(f"{listed(twice)} given twice", keys)
    for parts in MATRICES.values():
        if 0 < len(set(parts) & set(targets)) < len(parts):
            text = f"given {in_yaml(targets)}, but {listed(parts)} are one matrix in Megatron, with one adapter; "
            yield Violation(f"{text}valid: all {len(parts)} of them, or none", keys)


def check_lora_model(config: "Config", name: str, shape: ModelShape) -> Iterator[Violation]:
    """Against the model."""
    lora = config.roles.trained[name].lora
    if lora is None:
        return
    possible = [part for matrix in (ATTENTION if shape.num_experts else MATRICES) for part in MATRICES[matrix]]
    if set(lora.targets or []) - set(possible):
        text = f"given {in_yaml(lora.targets)}, but the experts of the model ({shape.family}) take no adapters; "
        yield Violation(f"{text}valid: {listed(possible)}", (f"roles.{name}.lora.targets", "model.path"))
        return
    heads, groups, width = shape.num_heads, shape.num_kv_heads, shape.ffn_hidden_size
    sides = {  # the other one is the hidden size
        "linear_qkv": (heads + 2 * groups) * shape.head_dim,
        "linear_proj": heads * shape.head_dim,
        "linear_fc1": 2 * width,
        "linear_fc2": width,
    }
    limit = min([shape.hidden_size, *(sides[matrix] for matrix in lora.matrices(shape))])
    if lora.rank > limit:
        text = f"given {lora.rank}, but the smallest side of a matrix with an adapter is {limit}; valid: up to {limit}"
        yield Violation(text, (f"roles.{name}.lora.rank", f"roles.{name}.lora.targets", "model.path"))
