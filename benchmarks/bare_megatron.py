"""A plain Megatron-Core training loop, as one writes it from pretrain_gpt.py: what the Engine is measured against.

Model, loss and step are Megatron's, with the defaults of its scripts. Only the "local" layers borrow megarl's norm and
attention: Megatron's own refuse sequence parallelism and packed sequences.
"""

import gc
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.engine import parallel
from megarl.engine.modules import PackedAttention, PackedSequences, RMSNorm

TRANSFORMER_IMPLS = ("transformer_engine", "local")


def run_bare(
    shape: dict,
    num_microbatches: int,
    microbatch_lengths: list[int],
    transformer_impl: str,
    dtype: str,
    steps: int,
    warmup: int,
) -> dict:
    """Train on random tokens; every rank of Megatron's groups calls it with the same arguments.

    `shape` is a qwen2 config.json; a step of a rank is `num_microbatches` packed micro-batches of sequences of
    `microbatch_lengths` tokens. Returns, of the `steps` after `warmup`, `step_s` (seconds between synchronisations of
    the device) and `loss` (nats per token, over all ranks), and `peak_gb`, the most GPU memory that tensors held since
    the call, 0 on a CPU. Model and optimizer are gone afterwards.
    """
    check_arguments(shape, microbatch_lengths, transformer_impl)
    if parallel.device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    result = train(shape, num_microbatches, microbatch_lengths, transformer_impl, getattr(torch, dtype), steps, warmup)
    result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    gc.collect()  # the model and its wrapper hold each other
    torch.cuda.empty_cache()
    return result


def check_arguments(shape: dict, microbatch_lengths: list[int], transformer_impl: str) -> None:
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    if shape["model_type"] != "qwen2":
        raise ValueError(f"model_type is {shape['model_type']!r}, only qwen2 is supported")
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ValueError(f"transformer_impl is {transformer_impl!r}, not one of {', '.join(TRANSFORMER_IMPLS)}")
    if sum(microbatch_lengths) % tensor_parallel:
        raise ValueError(
            f"sequence parallelism cuts the {sum(microbatch_lengths)} tokens of a micro-batch: "
            f"they must be a multiple of tensor_parallel={tensor_parallel}"
        )


def train(
    shape: dict,
    num_microbatches: int,
    lengths: list[int],
    transformer_impl: str,
    dtype: torch.dtype,
    steps: int,
    warmup: int,
) -> dict:
    model = build_model(shape, transformer_impl, dtype)
    optimizer = build_optimizer(model, dtype)
    model.config.finalize_model_grads_func = finalize_model_grads
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    arguments = shape, lengths, transformer_impl, dtype, generator
    microbatches = [random_microbatch(*arguments) for _ in range(num_microbatches)]
    step_s, sums = [], []
    for _ in range(warmup + steps):
        parallel.synchronize()
        start = time.perf_counter()
        sums.append(train_step(model, optimizer, microbatches))
        parallel.synchronize()
        step_s.append(time.perf_counter() - start)
    model.grad_accs.clear()  # through autograd's nodes these hold the model, unseen by Python's garbage collector
    total = torch.stack(sums)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    return {"step_s": step_s[warmup:], "loss": (total[:, 0] / total[:, 1]).tolist()[warmup:]}


def build_model(shape: dict, transformer_impl: str, dtype: torch.dtype) -> DistributedDataParallel:
    config = transformer_config(shape, transformer_impl, dtype)
    use_te = transformer_impl == "transformer_engine"
    model = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec() if use_te else local_block(config),
        vocab_size=padded_vocab_size(shape["vocab_size"]),
        max_sequence_length=shape["max_position_embeddings"],
        share_embeddings_and_output_weights=shape["tie_word_embeddings"],
        position_embedding_type="rope" if use_te else "none",  # PackedAttention rotates by itself
        rotary_base=int(shape["rope_theta"]),
    )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp_config, model.to(parallel.device()))


def transformer_config(shape: dict, transformer_impl: str, dtype: torch.dtype) -> TransformerConfig:
    on_gpu = parallel.device().type == "cuda"
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        ffn_hidden_size=shape["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=shape["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        use_cpu_initialization=not on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=transformer_impl == "transformer_engine",
        gradient_accumulation_fusion=False,  # needs NVIDIA's apex
    )


def local_block(config: TransformerConfig) -> TransformerBlockSubmodules:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)


def padded_vocab_size(vocab_size: int) -> int:
    """Megatron's scripts give each tensor-parallel rank a multiple of 128 rows."""
    multiple = 128 * parallel_state.get_tensor_model_parallel_world_size()
    return -(-vocab_size // multiple) * multiple


def build_optimizer(model: DistributedDataParallel, dtype: torch.dtype) -> MegatronOptimizer:
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-4,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def random_microbatch(
    shape: dict, lengths: list[int], transformer_impl: str, dtype: torch.dtype, generator: torch.Generator
) -> dict:
    """Sequences of `lengths`, packed to T tokens, as GPTModel takes them: [1, T] each."""
    device = parallel.device()
    tokens = torch.randint(0, shape["vocab_size"], (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    ends = torch.tensor(lengths).cumsum(0)
    loss_mask = torch.ones_like(tokens, dtype=torch.float32)
    loss_mask[0, ends - 1] = 0.0  # the last token's label is the next sequence's first
    return {
        "tokens": tokens.to(device),
        "labels": tokens.roll(-1).to(device),
        "loss_mask": loss_mask.to(device),
        "position_ids": positions[None].to(device),
        "packed_seq_params": packed_seq_params(shape, lengths, positions.to(device), transformer_impl, dtype),
    }


def packed_seq_params(
    shape: dict, lengths: list[int], positions: torch.Tensor, transformer_impl: str, dtype: torch.dtype
) -> PackedSeqParams:
    cu_seqlens = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(positions.device, torch.int32)
    packed = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": max(lengths),
        "max_seqlen_kv": max(lengths),
    }
    if transformer_impl == "transformer_engine":
        return PackedSeqParams(**packed)
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None] / shape["rope_theta"] ** exponents
    return PackedSequences(**packed, angles=torch.cat([angles, angles], dim=-1)[:, None, None], dtype=dtype)


def train_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, microbatches: list[dict]) -> torch.Tensor:
    """[2]: this rank's sum of losses and number of tokens."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    sums = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=microbatches[0]["tokens"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    return torch.stack(sums).sum(0)


def forward_step(data_iterator: Iterator[dict], model: DistributedDataParallel):
    batch = next(data_iterator)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=batch["packed_seq_params"],
    )
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor):
    """The three outputs by which the schedule divides the sum by the tokens and the number of micro-batches."""
    loss = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum()
    return loss, num_tokens.to(torch.int), torch.stack([loss.detach(), num_tokens])
