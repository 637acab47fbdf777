"""One Engine is one rank of a Megatron role: it holds a shard of the model and of the optimizer.

All ranks of the role call the same method with the same samples, in the same order; each works on its own part and the
ranks for which `parallel.reports_results()` holds return the results of their data-parallel replica.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megarl.config import OptimizerConfig
from megarl.data.packing import count_denominators, pack, plan_microbatches
from megarl.engine import parallel
from megarl.engine.hf.mapping import from_shards, hf_names, partition_dim
from megarl.engine.hf.shape import ModelShape
from megarl.engine.model import build_model, first_layer, load_hf_weights, transformer_config
from megarl.engine.step import run_microbatches
from megarl.sample import Batch, Sample

# (log-probs [T], batch) -> (loss already divided by the global denominators, metric sums)
Loss = Callable[[torch.Tensor, Batch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Engine:
    def __init__(
        self,
        model_path: str,
        dtype: str,
        max_tokens_per_gpu: int,
        sequence_parallel: bool = False,
        trainable: bool = True,
        load_weights: bool = True,
    ):
        """Build this rank's part of the model and load it from an HF folder; needs `parallel.initialize` first.

        Without `load_weights` only the folder's config.json is read, and a checkpoint must be loaded next; only a
        `trainable` engine has gradient buffers. Raises ConfigError where the folder's config or tensors do not fit.
        """
        self.shape = ModelShape.read(model_path)
        self.max_tokens_per_gpu = max_tokens_per_gpu
        self.dtype = getattr(torch, dtype)
        self.config = transformer_config(self.shape, self.dtype, sequence_parallel)
        self.model = build_model(self.shape, self.config)
        if load_weights:
            load_hf_weights(self.model, self.shape, model_path)
        self.runnable = self._with_gradients() if trainable else self.model
        self.optimizer = None
        self._reference: list[torch.Tensor] | None = None

    def _with_gradients(self) -> DistributedDataParallel:
        self.config.finalize_model_grads_func = _finalize_summed_gradients
        return DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module=self.model,
        )

    def use_optimizer(self, settings: OptimizerConfig) -> None:
        """Start a fresh AdamW (state zero); the learning rate comes with each step."""
        self.optimizer_settings = settings
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
            [self.runnable],
        )

    def train_step(self, samples: list[Sample], loss: Loss, learning_rate: float, temperature: float) -> dict[str, float]:
        """One optimizer step on all `samples` (the whole mini-batch, the same on every rank).

        Returns `grad_norm` (before clipping, the same on every rank) and, on reporting ranks, the sums over this
        replica's micro-batches of `loss` and of the loss function's metrics. Raises FloatingPointError, with the weights
        untouched, where the gradient norm is not finite.
        """

        def head(logprobs_T, entropy_T, batch):
            value, metrics = loss(logprobs_T, batch)
            return value, {"loss": value.detach(), **metrics}

        self.runnable.zero_grad_buffer()
        self.optimizer.zero_grad()
        _, batches = self._microbatches(samples)
        results = self._run(batches, head, temperature, forward_only=False)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm is {grad_norm}: the weights were not changed")
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            group["weight_decay"] = self.optimizer_settings.weight_decay * group.get("wd_mult", 1.0)
        self.optimizer.step()
        return {"grad_norm": grad_norm, **(_sums(results) if parallel.reports_results() else {})}

    def logprobs(
        self, samples: list[Sample], temperature: float, reference: bool = False
    ) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Position in `samples` -> (log-probs, entropy), each [L] float32 on CPU and 0 where not trained.

        Only this replica's samples, on reporting ranks; {} elsewhere. At logits/temperature; `reference` uses the weights
        of `capture_reference`, without entropies (None).
        """

        def head(logprobs_T, entropy_T, batch):
            lengths = batch.cu_seqlens.diff().tolist()

            def per_sequence(values_T):
                return values_T.masked_fill(~batch.loss_mask, 0.0).cpu().split(lengths)

            entropies = [None] * len(lengths) if entropy_T is None else per_sequence(entropy_T)
            return logprobs_T.sum(), {"per_sequence": list(zip(per_sequence(logprobs_T), entropies))}

        plan, batches = self._microbatches(samples)
        with self._reference_weights() if reference else contextlib.nullcontext(), torch.no_grad():
            results = self._run(batches, head, temperature, forward_only=True, entropy=not reference)
        if not parallel.reports_results():
            return {}
        return {
            index: tensors for indices, result in zip(plan, results) for index, tensors in zip(indices, result["per_sequence"])
        }

    def capture_reference(self) -> None:
        """Keep a host copy of the present weights: they are the reference policy from now on."""
        self._reference = [parameter.detach().to("cpu", copy=True) for parameter in self.model.parameters()]

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This stage's weights as full HF tensors, in a fixed order.

        A collective over the stage's TP ranks, so every rank iterates to the end; only sending ranks get tensors, the
        others get (name, empty tensor). A tied output layer is not repeated.
        """
        start = first_layer(self.model)
        for name, parameter in self.model.named_parameters():
            if name == "output_layer.weight" and self.shape.tied:
                continue
            names, dim = hf_names(self.shape, name, start), partition_dim(parameter)
            shards = [parameter.detach()] if dim < 0 else parallel.tensor_parallel_all_gather(parameter.detach())
            if parallel.sends_weights():
                yield from zip(names, from_shards(self.shape, name, len(names), shards, dim))
            else:
                yield from ((n, parameter.new_empty(0)) for n in names)

    def _microbatches(self, samples: list[Sample]) -> tuple[list[list[int]], list[Batch]]:
        lengths = [len(sample.token_ids) for sample in samples]
        plan = plan_microbatches(lengths, self.max_tokens_per_gpu, parallel.data_parallel_size())[parallel.data_parallel_rank()]
        denominators = count_denominators(samples)
        multiple_of = parallel.tensor_parallel_size() if self.config.sequence_parallel else 1
        batches = [pack([samples[i] for i in indices], *denominators, parallel.device(), multiple_of) for indices in plan]
        return plan, batches

    def _run(self, batches, head, temperature, forward_only, entropy=False) -> list[dict]:
        return run_microbatches(self.runnable, batches, head, self.shape, temperature, forward_only, entropy)

    @contextlib.contextmanager
    def _reference_weights(self):
        assert self._reference is not None, "capture_reference() comes first"
        self._swap_reference()
        try:
            yield
        finally:
            self._swap_reference()

    @torch.no_grad()
    def _swap_reference(self) -> None:
        """Exchange the model's weights with the host copy, one tensor at a time: no second model on the device."""
        for parameter, held in zip(self.model.parameters(), self._reference, strict=True):
            mine = parameter.detach().to("cpu", copy=True)
            parameter.copy_(held)
            held.copy_(mine)


def _sums(results: list[dict]) -> dict[str, float]:
    return {key: float(sum(result.get(key, 0.0) for result in results)) for key in {k for r in results for k in r}}


def _finalize_summed_gradients(model, num_tokens, **kwargs):
    """Megatron's reduction over DP ranks and tied embeddings, without its division by a token count: ours is done."""
    finalize_model_grads(model, None, **kwargs)
