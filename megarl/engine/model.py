"""Build the Megatron-Core GPT of an HF config, and read HF safetensors into it."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open

from megarl.config import RoleConfig
from megarl.engine import parallel
from megarl.engine.hf import FAMILIES
from megarl.engine.hf.mapping import VALUE_HEAD, Parameter, load_shard, padded_vocab_size
from megarl.engine.hf.shape import ModelShape
from megarl.engine.lora import add_adapters, start_adapters
from megarl.engine.modules import PackedAttention, RMSNorm, ValueHead, residual_add
from megarl.errors import ConfigError


def transformer_config(shape: ModelShape, dtype: torch.dtype, role: RoleConfig, use_te: bool) -> TransformerConfig:
    """Megatron's config for this model on the groups that `parallel.initialize` made."""
    on_gpu, chunks = parallel.device().type == "cuda", parallel.virtual_pipeline_size()
    family_arguments = FAMILIES[shape.family].transformer_arguments(shape)
    if shape.num_experts:
        family_arguments |= {"moe_grouped_gemm": use_te, "moe_permute_fusion": use_te}
    # Experts weigh it by the router's probabilities, in Megatron's kernel.
    te_activation = use_te and not shape.num_experts
    if role.recompute != "none":
        family_arguments |= recompute_arguments(role, shape)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        **family_arguments,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel_size(),
        pipeline_model_parallel_size=parallel.pipeline_parallel_size(),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        context_parallel_size=parallel.context_parallel_size(),
        expert_model_parallel_size=parallel.expert_parallel_size(),
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size(),
        sequence_parallel=role.sequence_parallel,
        use_cpu_initialization=not on_gpu,
        perform_initialization=False,  # every weight is loaded
        # The loss arrives divided by its global denominators: from here on gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; Megatron ties this to the all-to-all dispatcher even for dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The only pair of values that keeps messages in order under interleaved pipelines too.
        batch_p2p_comm=False,
        overlap_p2p_comm=chunks > 1,
        deallocate_pipeline_outputs=True,  # once the next stage has them
        bias_activation_fusion=on_gpu and not te_activation,
        use_te_activation_func=te_activation,
        # These need NVIDIA's apex for Megatron's own layers; `fuse_gradient_accumulation` serves transformer-engine's.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def recompute_arguments(role: RoleConfig, shape: ModelShape) -> dict:
    """ "Reducing Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 5."""
    if role.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    modules = role.recompute_modules or ["moe" if shape.num_experts else "mlp"]
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def build_chunks(
    shape: ModelShape, config: TransformerConfig, use_te: bool, head: str, role: RoleConfig
) -> list[GPTModel]:
    """This rank's chunks (one, or `virtual_pipeline_parallel`) on its device; weights not set but those of adapters and
    of a value head."""
    return [_build_chunk(shape, config, use_te, head, role, chunk) for chunk in range(parallel.virtual_pipeline_size())]


def _build_chunk(
    shape: ModelShape, config: TransformerConfig, use_te: bool, head: str, role: RoleConfig, chunk: int
) -> GPTModel:
    vp_stage = chunk if parallel.virtual_pipeline_size() > 1 else None
    layer, norm = te_layer(config) if use_te else local_layer(config)
    if role.lora:
        add_adapters(layer, role.lora, shape)
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    has_head = parallel.holds_head(chunk)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm),
        vocab_size=padded_vocab_size(shape, parallel.tensor_parallel_size()),
        max_sequence_length=shape.max_positions,
        pre_process=parallel.holds_embedding(chunk),
        post_process=has_head,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied and head == "lm",
        position_embedding_type="none",  # the core attention has it
        vp_stage=vp_stage,
    )
    if has_head and head == "value":
        model.output_layer = ValueHead(config, role.value_head_bias)
        model.output_layer.initialize(role.value_head_std)
    if role.lora:
        start_adapters(parameters_of(model, shape))
        if parallel.holds_embedding(chunk):  # what is recomputed gets no gradient where its input asks for none
            model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return model.to(parallel.device())


def local_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """(layer, final norm) of Megatron's own linear layers and our norm and attention."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add
    if config.num_moe_experts:  # Megatron's map is a dense layer's: transformer-engine's would not find the MLP's norm
        layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer, RMSNorm


def te_layer(config: TransformerConfig) -> tuple[ModuleSpec, type]:
    """(layer, final norm) of transformer-engine, whose core attention applies the rotary embedding first."""
    from megatron.core.extensions.transformer_engine import TENorm

    from megarl.engine.te_modules import PackedTEAttention, SwiGLU

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )
    layer.submodules.self_attention.submodules.core_attention = PackedTEAttention
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = residual_add
    if config.use_te_activation_func:
        layer.submodules.mlp.keywords["submodules"].activation_func = SwiGLU
    return layer, TENorm


def fuse_gradient_accumulation(chunks: list[GPTModel]) -> None:
    """Let transformer-engine's layers add weight gradients to `main_grad` inside the matrix product.

    Megatron's switch for it also wants apex's kernel, for the output layer alone.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def parameters_of(chunk: GPTModel, shape: ModelShape) -> Iterator[tuple[Parameter, torch.nn.Parameter]]:
    """The chunk's parameters with their place in the whole model, in a fixed order."""
    first_expert = parallel.expert_parallel_rank() * (shape.num_experts // parallel.expert_parallel_size())
    first_layer = chunk.decoder.layers[0].layer_number - 1
    has_value_head = isinstance(getattr(chunk, "output_layer", None), ValueHead)
    for name, parameter in chunk.named_parameters():
        if has_value_head:
            name = name.replace("output_layer.", "value_head.")
        yield Parameter.parse(name, first_layer, first_expert), parameter


@torch.no_grad()
def load_hf_weights(chunks: list[GPTModel], shape: ModelShape, model_path: str | Path) -> None:
    """Fill this rank's shards from the folder's safetensors, one full tensor at a time; adapters, and a value head that
    the folder lacks, keep their initial weights.

    Raises ConfigError naming every tensor that the folder lacks, or a bias of its value head that this one has no place
    for.
    """
    where = hf_tensor_files(Path(model_path))
    wanted = [
        (key, parameter)
        for chunk in chunks
        for key, parameter in parameters_of(chunk, shape)
        if key.adapted is None and (key.line not in VALUE_HEAD or where.keys() >= set(key.hf_names(shape)))
    ]
    missing = sorted({name for key, _ in wanted for name in key.hf_names(shape)} - where.keys())
    if missing:
        names = f"{', '.join(missing[:10])} ({len(missing)} in all)"
        raise ConfigError(f"model.path: {model_path} lacks the tensors {names}")
    opened = {file: safe_open(file, framework="pt") for file in set(where.values())}

    def read(name: str) -> torch.Tensor:
        return opened[where[name]].get_tensor(name)

    lines = {key.line for key, _ in wanted}
    has_no_bias = "value_head.weight" in lines and "value_head.bias" not in lines
    if has_no_bias and "score.bias" in where and (bias := read("score.bias").item()):
        raise ConfigError(f"{model_path} has a score.bias of {bias:g}, and the value head has none (value_head_bias)")
    for key, parameter in wanted:
        load_shard(shape, key, parameter, read, *tensor_parallel_place(key))


def tensor_parallel_place(key: Parameter) -> tuple[int, int]:
    """(rank, size) among the ranks that split the parameter: experts have groups of their own."""
    if key.expert is not None:
        return parallel.expert_tensor_parallel_rank(), parallel.expert_tensor_parallel_size()
    return parallel.tensor_parallel_rank(), parallel.tensor_parallel_size()


def hf_tensor_files(model_path: Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file of the folder that holds it."""
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {model_path} holds no *.safetensors file")
    return {name: file for file in files for name in safe_open(file, framework="pt").keys()}
