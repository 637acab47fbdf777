"""Run stock megatron-core 0.19.2 on a machine without CUDA, over gloo.

`install()` is called once per process, before any Megatron object is built; where CUDA is available it does nothing.

Mechanism: `_retarget` swaps, inside the code object of ONE named function, the attribute name `cuda` for `cpu` and the
literals "cuda", "torch.cuda.FloatTensor" and alike for their CPU forms. torch.cpu mirrors current_device(),
synchronize(), current_stream(), Stream and Event, and Tensor.cpu() is the identity on a CPU. Line numbers and
tracebacks stay, nothing outside the listed functions changes, and a listed function with nothing left to swap is an
error, so that a new Megatron version is noticed.
"""

import contextlib
import importlib
import importlib.metadata
import types

import torch

MEGATRON_VERSION = "0.19.2"

_LITERALS = {"cuda": "cpu"} | {f"torch.cuda.{t}": f"torch.{t}" for t in ("FloatTensor", "HalfTensor", "BFloat16Tensor")}

# module below megatron.core -> functions that name CUDA outright
_CUDA_FUNCTIONS = {
    "tensor_parallel.mappings": [
        "_gather_along_last_dim",
        "_gather_along_first_dim",
        "_reduce_scatter_along_first_dim",
        "_AllToAll.forward",
    ],
    "tensor_parallel.layers": ["LinearWithGradAccumulationAndAsyncCommunication.backward"],
    "utils": ["GlobalMemoryBuffer.get_tensor", "local_multi_tensor_l2_norm"],
    "pipeline_parallel.p2p_communication": ["P2PCommunicator._communicate", "P2PCommunicator._communicate_shapes"],
    "pipeline_parallel.schedules": [
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ],
    "models.common.language_module.language_module": ["LanguageModule.setup_embeddings_and_output_layer"],
    "distributed.param_and_grad_buffer": ["_ParamAndGradBuffer.__init__", "_ParamAndGradBucketGroup.start_grad_sync"],
    "optimizer.clip_grads": ["get_grad_norm_fp32", "count_zeros_fp32", "clip_grad_by_total_norm_fp32"],
    "optimizer.optimizer": [
        "FP32Optimizer.__init__",
        "MixedPrecisionOptimizer.__init__",
        "Float16OptimizerWithFloat16Params.__init__",
        "MegatronOptimizer.has_grad_norm_group",
        "ChainedOptimizer.get_loss_scale",
    ],
    "optimizer.distrib_optimizer": [
        "DistributedOptimizer.__init__",
        "DistributedOptimizer._build_model_and_main_param_groups",
    ],
    "transformer.moe.router": ["Router.gating"],
    "transformer.moe.token_dispatcher": ["MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize"],
}


def install() -> bool:
    """Patch this process; True where CUDA is absent and the CPU patches were applied.

    Raises RuntimeError where the installed megatron-core is not the version that the patches were written for.
    """
    found = importlib.metadata.version(
        "megatron-core"
    )  # megatron.core.__version__ adds the git hash of the folder it is run in
    if found != MEGATRON_VERSION:
        raise RuntimeError(f"megarl needs megatron-core {MEGATRON_VERSION}, found {found}")
    if torch.cuda.is_available():
        return False
    for module, functions in _CUDA_FUNCTIONS.items():
        for function in functions:
            _retarget(f"megatron.core.{module}", function)
    _patch_rng()
    _patch_moe_dispatcher()
    return True


def _retarget(module: str, qualified_name: str) -> None:
    found = importlib.import_module(module)
    for part in qualified_name.split("."):
        found = vars(found)[part]
    function = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
    function = function.fget if isinstance(function, property) else function
    while hasattr(function, "__wrapped__"):  # below no_grad, nvtx, lru_cache
        function = function.__wrapped__
    if getattr(function, "_megarl_on_cpu", False):
        return
    code = _swap_cuda(function.__code__)
    if code == function.__code__:
        raise RuntimeError(f"cpu_compat: {module}.{qualified_name} names CUDA no more; has megatron-core changed?")
    function.__code__ = code
    function._megarl_on_cpu = True


def _swap_cuda(value):
    """The code object, constant or tuple of constants with `cuda` swapped for `cpu` throughout."""
    if isinstance(value, types.CodeType):
        return value.replace(
            co_names=tuple("cpu" if name == "cuda" else name for name in value.co_names),
            co_consts=tuple(_swap_cuda(constant) for constant in value.co_consts),
        )
    if isinstance(value, (tuple, frozenset)):
        return type(value)(_swap_cuda(constant) for constant in value)
    return _LITERALS.get(value, value) if isinstance(value, str) else value


class _CPURNGStatesTracker:
    """The contract of Megatron's CudaRNGStatesTracker on torch's CPU generator."""

    def __init__(self, *_, **__):
        self.use_cudagraphable_rng = False
        self.is_inference_rng_tracker = False
        self.reset()

    def reset(self):
        self.states_, self.seeds_, self._initialized = {}, set(), False

    def is_initialized(self):
        return self._initialized

    def get_states(self):
        return dict(self.states_)

    def set_states(self, states):
        self._initialized, self.states_ = True, states

    def add(self, name, seed):
        self._initialized = True
        if seed in self.seeds_ or name in self.states_:
            raise RuntimeError(f"random state {name} or its seed {seed} is in use already")
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        saved = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(saved)


def _patch_rng() -> None:
    import megatron.core.tensor_parallel.random as random

    random.CudaRNGStatesTracker = _CPURNGStatesTracker
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _patch_moe_dispatcher() -> None:
    """The dispatcher waits on an event of a copy stream, which torch.cpu's streams do not record, and makes numpy arrays,
    which its all-to-all needs as split sizes, of CUDA tensors only."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    class Stream(torch.cpu.Stream):
        def record_event(self, event=None):
            return torch.cpu.Event()

    def on_cpu_already(tensor, as_numpy=False, record_stream=False):
        return tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = Stream()
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu_already
