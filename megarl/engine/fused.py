"""Which of the fused implementations that Megatron-Core can use are really there."""

import importlib.metadata
import importlib.util

import torch

from megarl.errors import ConfigError


def use_transformer_engine(transformer_impl: str, dtype: torch.dtype) -> bool:
    """Whether the layers are transformer-engine's. `auto`: on a GPU, in bfloat16, where it imports.

    Raises ConfigError where it is asked for and cannot be had.
    """
    if transformer_impl == "local":
        return False
    why = why_not_transformer_engine(dtype)
    if why and transformer_impl == "transformer_engine":
        raise ConfigError(f"model.transformer_impl: given transformer_engine, but {why}; local works")
    return why is None


def why_not_transformer_engine(dtype: torch.dtype) -> str | None:
    if not torch.cuda.is_available():
        return "transformer-engine needs a GPU, and none is seen here"
    if dtype != torch.bfloat16:
        return f"its packed attention needs model.dtype: bfloat16, given {str(dtype).removeprefix('torch.')}"
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return None if HAVE_TE else "it does not import here: launch/setup_env.sh gpu installs it"


def live_paths(use_te: bool) -> dict[str, str]:
    """What runs where several implementations exist, for the run's first lines: name -> implementation."""
    on_gpu = torch.cuda.is_available()
    attention = "varlen_attn of torch (bfloat16), else SDPA" if on_gpu else "SDPA of torch, padded"
    return {
        "layers": f"transformer-engine {importlib.metadata.version('transformer-engine')}"
        if use_te
        else "local (torch)",
        "attention": "transformer-engine, cuDNN or flash" if use_te else attention,
        "rotary embedding": "fused (transformer-engine)" if use_te else "torch",
        "norms": "fused with the linear layers (transformer-engine)" if use_te else "torch RMSNorm",
        "weight gradients": "added in the matrix product (transformer-engine)" if use_te else "added afterwards",
        "log-probs": "Triton kernels" if on_gpu else "torch, in chunks",
        "optimizer": _optimizer(),
        "apex": apex_state(),
    }


def _optimizer() -> str:
    from megatron.core.optimizer import Adam

    return f"{Adam.__module__.split('.')[0]} {Adam.__name__}"


def apex_state() -> str:
    """NVIDIA's apex is built from its repository; the `apex` of PyPI is another project of the same name."""
    if importlib.util.find_spec("apex") is None:
        return "absent (optional)"
    if importlib.util.find_spec("amp_C") is None and importlib.util.find_spec("apex.multi_tensor_apply") is None:
        return "not NVIDIA's: PyPI's `apex` is an unrelated project; pip uninstall apex"
    kernels = [name for name in ("amp_C", "fused_weight_gradient_mlp_cuda") if importlib.util.find_spec(name)]
    return f"NVIDIA's, with {', '.join(kernels)}" if kernels else "NVIDIA's, without its CUDA extensions"
