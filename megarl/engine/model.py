"""Build the Megatron-Core GPT of an HF config, and read HF safetensors into it."""

from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open

from megarl.engine import parallel
from megarl.engine.hf import FAMILIES
from megarl.engine.hf.mapping import hf_names, load_shard, padded_vocab_size
from megarl.engine.hf.shape import ModelShape
from megarl.engine.modules import PackedAttention, RMSNorm
from megarl.errors import ConfigError


def transformer_config(shape: ModelShape, dtype: torch.dtype, sequence_parallel: bool) -> TransformerConfig:
    """Megatron's config for this model on the groups that `parallel.initialize` made."""
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
        **FAMILIES[shape.family].transformer_arguments(shape.hf),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_parallel_size(),
        pipeline_model_parallel_size=parallel.pipeline_parallel_size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=parallel.device().type == "cpu",
        perform_initialization=False,  # every weight is loaded
        # The loss arrives divided by its global denominators: from here on gradients are summed, never averaged.
        calculate_per_token_loss=True,
        # Packed micro-batches differ in length; Megatron ties this to the all-to-all dispatcher even for dense models.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The only pair of values that keeps messages in order under interleaved pipelines too.
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
        # Fused kernels need apex or transformer-engine.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )


def build_model(shape: ModelShape, config: TransformerConfig) -> GPTModel:
    """This rank's pipeline stage, on its device, weights not set."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    block = TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
    model = GPTModel(
        config,
        block,
        vocab_size=padded_vocab_size(shape, parallel.tensor_parallel_size()),
        max_sequence_length=shape.max_positions,
        pre_process=parallel.is_first_stage(),
        post_process=parallel.is_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # PackedAttention has it
    )
    return model.to(parallel.device())


def first_layer(model: GPTModel) -> int:
    """Global number of the first layer that this pipeline stage holds."""
    return model.decoder.layers[0].layer_number - 1


def load_hf_weights(model: GPTModel, shape: ModelShape, model_path: str | Path) -> None:
    """Fill this rank's shards from the folder's safetensors, one full tensor at a time.

    Raises ConfigError naming every tensor that the folder lacks.
    """
    where = hf_tensor_files(Path(model_path))
    needed = {name: hf_names(shape, name, first_layer(model)) for name, _ in model.named_parameters()}
    missing = sorted({hf_name for names in needed.values() for hf_name in names} - where.keys())
    if missing:
        raise ConfigError(f"model.path: {model_path} lacks the tensors {', '.join(missing[:10])} ({len(missing)} in all)")
    opened = {file: safe_open(file, framework="pt") for file in set(where.values())}
    rank, size = parallel.tensor_parallel_rank(), parallel.tensor_parallel_size()
    for name, parameter in model.named_parameters():
        load_shard(shape, name, parameter, first_layer(model), lambda n: opened[where[n]].get_tensor(n), rank, size)


def hf_tensor_files(model_path: Path) -> dict[str, Path]:
    """HF tensor name -> the safetensors file of the folder that holds it."""
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {model_path} holds no *.safetensors file")
    return {name: file for file in files for name in safe_open(file, framework="pt").keys()}
