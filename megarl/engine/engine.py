"""One Engine is one rank of a Megatron role: it holds a shard of the model and of the optimizer.

All ranks of the role call the same method with the same samples, in the same order; each works on its own part and the
ranks for which `parallel.reports_results()` holds return the results of their data-parallel replica.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megarl.config import CriticConfig, ModelConfig, OptimizerConfig, Phase, RoleConfig
from megarl.data.packing import count_denominators, pack, padded, plan_microbatches
from megarl.engine import parallel
from megarl.engine.fused import use_transformer_engine, why_not_transformer_engine
from megarl.engine.hf.flops import forward_flops
from megarl.engine.hf.mapping import Parameter, from_shards
from megarl.engine.hf.shape import ModelShape
from megarl.engine.host_optimizer import HostOptimizer
from megarl.engine.logprob import logprobs_and_entropy
from megarl.engine.lora import adapted_weights
from megarl.engine.model import (
    build_chunks,
    fuse_gradient_accumulation,
    load_hf_weights,
    parameters_of,
    transformer_config,
)
from megarl.engine.modules import inverse_frequencies
from megarl.engine.offload import MovedTensors, Snapshot
from megarl.engine.step import Head, run_microbatches
from megarl.errors import ConfigError
from megarl.sample import Batch, Sample

# (log-probs or values [T], batch[, entropy=[T]]) -> (loss already divided by the global denominators, metric sums)
Loss = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Engine:
    def __init__(
        self,
        model: ModelConfig,
        role: RoleConfig | CriticConfig,
        head: Literal["lm", "value"] = "lm",
        trainable: bool = True,
        load_weights: bool = True,
    ):
        """Build this rank's part of the model and load it from an HF folder; needs `parallel.initialize` first.

        Without `load_weights` only the folder's config.json is read, and a checkpoint must be loaded next; only a
        `trainable` engine has gradient buffers. A value head needs a CriticConfig, by which it is drawn where the
        folder has none. Raises ConfigError where the folder's config or tensors do not fit.
        """
        self.shape = ModelShape.read(model.path)
        self.role = role
        self.offload = role.offload or "none"
        self.head = head
        self.dtype = getattr(torch, model.dtype)
        self.use_te = use_transformer_engine(model.transformer_impl, self.dtype)
        if parallel.context_parallel_size() > 1 and not self.use_te:
            why = why_not_transformer_engine(self.dtype) or "model.transformer_impl: local rules it out"
            raise ConfigError(f"context_parallel needs transformer-engine's attention, and {why}")
        self.config = transformer_config(self.shape, self.dtype, role, self.use_te)
        self.inverse_frequencies = inverse_frequencies(self.shape).to(parallel.device())
        self.chunks = build_chunks(self.shape, self.config, self.use_te, head, role)
        if load_weights:
            load_hf_weights(self.chunks, self.shape, model.path)
        self._adapted = adapted_weights(self.chunks)
        self.runnable = self._with_gradients() if trainable else self.chunks
        self.optimizer = None
        self._host_optimizers: list[HostOptimizer] = []
        self._reference: Snapshot | None = None
        self._phase: Phase = "update"
        self._moved_weights, self._moved_optimizer = MovedTensors(), MovedTensors()

    def _with_gradients(self) -> list[DistributedDataParallel]:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=self.role.overlap_grad_reduce
        )
        wrapped = [
            DistributedDataParallel(self.config, settings, chunk, disable_bucketing=i > 0)
            for i, chunk in enumerate(self.chunks)
        ]
        self.config.finalize_model_grads_func = _finalize_summed_gradients
        if self.role.overlap_grad_reduce:  # of all micro-batches the last one alone reduces
            self.config.no_sync_func = [ddp.no_sync for ddp in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
        if self.use_te:
            fuse_gradient_accumulation(self.chunks)
        return wrapped

    def use_optimizer(self, settings: OptimizerConfig) -> None:
        """Start a fresh AdamW (state zero); the learning rate comes with each step."""
        self.require("update")
        self.optimizer_settings = settings
        self.optimizer, self._host_optimizers = None, []  # its memory goes before the next one's is taken
        gc.collect()
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.epsilon,
                clip_grad=settings.clip_grad,
                bf16=self.dtype == torch.bfloat16,
                params_dtype=self.dtype,
                use_distributed_optimizer=True,
            ),
            self.runnable,
            use_gloo_process_groups=False,
        )
        if self.role.host_optimizer:
            self._host_optimizers = [HostOptimizer(one) for one in self.optimizer.chained_optimizers]

    def train_step(
        self,
        samples: list[Sample],
        loss: Loss,
        learning_rate: float,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        pairs: bool = False,
    ) -> dict[str, float]:
        """One optimizer step on all `samples` (the whole mini-batch, the same on every rank).

        With `entropy_gradient`, `loss` gets the entropies too and may differentiate them. With `pairs`, samples 2i and
        2i + 1 lie side by side in one micro-batch, in that order. Returns, the same on every rank, `grad_norm` (before
        clipping) and `skipped`: 1.0 where a loss, a trained token's log-prob or value or the gradient was not finite,
        and weights and optimizer are as they were. Reporting ranks add the sums over this replica's micro-batches of
        `loss`, of the loss function's metrics and of `nonfinite_logprobs`, which counts values too.
        """
        self.require("update")
        for chunk in self.runnable:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        _, batches = self._microbatches(samples, pairs)
        entropy = "gradient" if entropy_gradient else "none"
        results = _sums(self._run(batches, _loss_head(loss), temperature, entropy))
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        broken = not math.isfinite(results.get("loss", 0.0)) or results.get("nonfinite_logprobs", 0.0) > 0
        skipped = parallel.any_rank(broken or not math.isfinite(grad_norm))
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
                group["weight_decay"] = self.optimizer_settings.weight_decay * group.get("wd_mult", 1.0)
            self.optimizer.step()
        return {"grad_norm": grad_norm, "skipped": float(skipped), **(results if parallel.reports_results() else {})}

    @torch.no_grad()
    def evaluate(self, samples: list[Sample], loss: Loss, pairs: bool = False) -> dict[str, float]:
        """The sums that `train_step` would report of these samples, without gradient or update; {} on other ranks."""
        self.require("score")
        _, batches = self._microbatches(samples, pairs)
        results = _sums(self._run(batches, _loss_head(loss), 1.0, "none", forward_only=True))
        return results if parallel.reports_results() else {}

    def logprobs(
        self, samples: list[Sample], temperature: float, reference: bool = False
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Position in `samples` -> (log-probs, entropy), each [L] float32 on CPU and 0 where not trained.

        Only this replica's samples, on reporting ranks; {} elsewhere. At logits/temperature; `reference` uses the
        weights of `capture_reference`, without entropies (None).
        """
        with self._reference_weights() if reference else contextlib.nullcontext():
            return self._score(samples, temperature, "none" if reference else "value")

    def values(self, samples: list[Sample]) -> dict[int, torch.Tensor]:
        """Position in `samples` -> [L] float32 on CPU: entry t is the value of the tokens before t; 0 if not trained.

        Of an engine with a value head; as `logprobs` otherwise.
        """
        assert self.head == "value", "this engine has no value head"
        return {index: values for index, (values, _) in self._score(samples, 1.0, "none").items()}

    @torch.no_grad()
    def _score(self, samples, temperature, entropy) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        self.require("score")

        def head(predictions_T, entropy_T, batch):
            lengths = batch.cu_seqlens.diff().tolist()

            def per_sequence(values_T):
                return values_T.masked_fill(~batch.loss_mask, 0.0).cpu().split(lengths)

            entropies = [None] * len(lengths) if entropy_T is None else per_sequence(entropy_T)
            return predictions_T.sum(), {"per_sequence": list(zip(per_sequence(predictions_T), entropies))}

        plan, batches = self._microbatches(samples)
        results = self._run(batches, head, temperature, entropy, forward_only=True)
        if not parallel.reports_results():
            return {}
        return {
            index: tuple(None if x is None else x[: len(samples[index].token_ids)] for x in tensors)
            for indices, result in zip(plan, results)
            for index, tensors in zip(indices, result["per_sequence"])
        }

    def capture_reference(self, ema_decay: float | None = None) -> None:
        """Keep a host copy of the present weights: they are the reference policy from now on.

        With `ema_decay`, and where there is one already, it becomes ema_decay * reference + (1 - ema_decay) * weights;
        it is then kept in float32, as bfloat16 would lose what a small share adds. Where there are adapters, copy and
        average are of their matrices: all else is frozen.
        """
        self.require("score")
        if ema_decay is not None and self._reference is not None:
            self._reference.average(self._trained_weights(), ema_decay)
            return
        self._reference = self._reference or Snapshot()
        self._reference.take(self._trained_weights(), None if ema_decay is None else torch.float32)

    def reserve_reference(self, dtype: torch.dtype) -> None:
        """Room for a reference whose values `reference_tensors` gives to be filled."""
        self._reference = self._reference or Snapshot()
        self._reference.reserve(self._trained_weights(), dtype)

    def reference_tensors(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each parameter that is not frozen with its values in the reference, in host memory."""
        assert self._reference is not None, "capture_reference() comes first"
        trained = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return list(zip(trained, self._reference.parts, strict=True))

    def optimizer_values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of a master weight or moment: a view of its values, wherever they are; what is written to it stays."""
        for optimizer in self._host_optimizers:
            tensor = optimizer.values(tensor)
        return tensor

    def hf_tensors(
        self, read: Callable[[torch.nn.Parameter], torch.Tensor] | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This stage's weights as full HF tensors, in a fixed order; adapters are merged into them.

        A collective over the ranks for which `parallel.helps_to_send()` holds, so each of them iterates to the end;
        only sending ranks get tensors, the others get (name, empty tensor). A tied output layer is not repeated. `read`
        gives what is exported of a parameter in place of its merged weight: a tensor of its shape.
        """
        self.require("score")
        yield from self._hf_tensors(read or self._merged, parallel.sends_weights())

    def hf_shapes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same without the values: meta tensors on every rank, and no collective."""
        return self._hf_tensors(lambda parameter: parameter.detach().to("meta"), True)

    def _hf_tensors(self, read, wanted: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for chunk in self.chunks:
            for key, parameter in parameters_of(chunk, self.shape):
                if key.adapted is not None or (key.line == "output_layer.weight" and self.shape.tied):
                    continue
                for part, shards in self._gathered(key, read(parameter)):
                    if wanted:
                        yield from zip(part.hf_names(self.shape), from_shards(self.shape, part, shards))
                    else:
                        yield from ((name, parameter.new_empty(0)) for name in part.hf_names(self.shape))

    def _merged(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        layer = self._adapted.get(parameter)
        return parameter.detach() if layer is None else layer.merged_weight()

    def _gathered(self, key: Parameter, tensor: torch.Tensor) -> Iterator[tuple[Parameter, list[torch.Tensor]]]:
        """The shards of a parameter; of an expert also those of the same expert on the other expert-parallel ranks."""
        if key.expert is None:
            yield key, [tensor] if key.partition_dim < 0 else parallel.tensor_parallel_all_gather(tensor)
            return
        shards = parallel.expert_tensor_parallel_all_gather(tensor)
        by_rank = zip(*(parallel.expert_parallel_all_gather(shard) for shard in shards))
        num_local = self.shape.num_experts // parallel.expert_parallel_size()
        for rank, shards_of_rank in enumerate(by_rank):
            yield Parameter(key.line, key.layer, rank * num_local + key.expert % num_local), list(shards_of_rank)

    def place(self, phase: Phase) -> None:
        """Hold on the device what `phase` needs, move the rest of what the role's `offload` names to host memory.

        generate: nothing; score: the weights; update: gradients and optimizer too.
        """
        if self.offload != "none" and phase != self._phase:
            self._moved_weights.move_in()
            if phase == "update":
                self._moved_optimizer.move_in()
            else:
                self._moved_optimizer.move_out(kept=self._optimizer_tensors(), dropped=self._gradients())
            if phase == "generate" and self.offload == "all":
                self._moved_weights.move_out(kept=self._weights())
            parallel.synchronize()
            parallel.free_cache()
        self._phase = phase

    def require(self, phase: Phase) -> None:
        order = ("generate", "score", "update")
        weights_stay = self.offload == "optimizer" and phase == "score"
        held = self.offload == "none" or weights_stay or order.index(self._phase) >= order.index(phase)
        assert held, f"place({phase!r}) comes first: the engine is placed for {self._phase!r}"

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def _weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters()]

    def _trained_weights(self) -> list[torch.Tensor]:
        return [parameter.data for parameter in self.parameters() if parameter.requires_grad]

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self.parameters() if hasattr(parameter, "main_grad")]

    def _optimizer_tensors(self) -> list[torch.Tensor]:
        """Master weights and moments, where they are on the device; not those master weights that in float32 are views
        of the weights themselves."""
        weights = {tensor.untyped_storage()._cdata for tensor in self._weights()}
        held = []
        on_device = self.optimizer is not None and not self._host_optimizers
        for optimizer in self.optimizer.chained_optimizers if on_device else []:
            held += [parameter.data for group in optimizer.optimizer.param_groups for parameter in group["params"]]
            values = (value for state in optimizer.optimizer.state.values() for value in state.values())
            held += [value for value in values if isinstance(value, torch.Tensor)]
        return [tensor for tensor in held if tensor.untyped_storage()._cdata not in weights]

    def _microbatches(self, samples: list[Sample], pairs: bool = False) -> tuple[list[list[int]], list[Batch]]:
        cp, pipeline = parallel.context_parallel_size(), parallel.pipeline_parallel_size()
        sequence_multiple = 2 * cp if cp > 1 else 1
        multiple_of = sequence_multiple * (parallel.tensor_parallel_size() if self.config.sequence_parallel else 1)
        lengths = [padded(len(sample.token_ids), sequence_multiple) for sample in samples]
        costs = [forward_flops(self.shape, n) for n in lengths] if self.role.balance == "flops" else None
        plan = plan_microbatches(
            lengths,
            self.role.max_tokens_per_gpu * cp,
            parallel.data_parallel_size(),
            costs,
            count_multiple=pipeline if len(self.chunks) > 1 else 1,
            unit=2 if pairs else 1,
        )[parallel.data_parallel_rank()]
        fixed = (*count_denominators(samples), parallel.device(), multiple_of, sequence_multiple, samples[:1])
        batches = [pack([samples[i] for i in indices], *fixed) for indices in plan]
        return plan, batches

    def _run(self, batches, head, temperature, entropy, forward_only=False) -> list[dict]:
        def predict(output, targets):
            if self.head == "value":
                return output.squeeze(-1).float(), None
            return logprobs_and_entropy(
                output, targets, self.shape.vocab_size, temperature, entropy != "none", entropy == "gradient"
            )

        return run_microbatches(self.runnable, batches, predict, head, self.inverse_frequencies, forward_only)

    @contextlib.contextmanager
    @torch.no_grad()
    def _reference_weights(self):
        """The reference's weights in the place of the engine's own, which stay on the device beside them."""
        own = [(parameter, parameter.data) for parameter, _ in self.reference_tensors()]
        for parameter, values in self.reference_tensors():
            parameter.data = values.to(parameter.device, parameter.dtype, non_blocking=True)
        try:
            yield
        finally:
            for parameter, weights in own:
                parameter.data = weights


def _loss_head(loss: Loss) -> Head:
    """Gives the loss, its metrics and the number of trained tokens whose log-prob or value is not finite."""

    def head(predictions_T, entropy_T, batch):
        value, metrics = loss(predictions_T, batch, **({} if entropy_T is None else {"entropy": entropy_T}))
        broken = (~torch.isfinite(predictions_T) & batch.loss_mask).sum().float()
        return value, {"loss": value.detach(), "nonfinite_logprobs": broken, **metrics}

    return head


def _sums(results: list[dict]) -> dict[str, float]:
    keys = dict.fromkeys(key for result in results for key in result)  # a set has another order in each process
    return {key: float(sum(result.get(key, 0.0) for result in results)) for key in keys}


def _finalize_summed_gradients(model, num_tokens, **kwargs):
    """Megatron's reduction over DP ranks and tied embeddings, without its division by a token count: ours is done."""
    finalize_model_grads(model, None, **kwargs)
