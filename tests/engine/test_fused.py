"""What is told at start about fused implementations, and what is refused."""

import importlib
import sys

import pytest
import torch

from megarl.engine.fused import apex_state, live_paths, use_transformer_engine
from megarl.errors import ConfigError


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder whose modules can be found; gone with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("apex", "amp_C", "fused_weight_gradient_mlp_cuda"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def add(folder, *modules):
    for module in modules:
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).touch()
    importlib.invalidate_caches()


def test_an_absent_apex_is_optional(packages):
    assert apex_state() == "absent (optional)"


def test_the_apex_of_pypi_is_named(packages):
    add(packages, "apex/__init__.py", "apex/models.py")
    assert apex_state() == "not NVIDIA's: PyPI's `apex` is an unrelated project; pip uninstall apex"


def test_nvidias_apex_is_told_with_its_kernels(packages):
    add(packages, "apex/__init__.py", "apex/multi_tensor_apply.py")
    assert apex_state() == "NVIDIA's, without its CUDA extensions"
    add(packages, "amp_C.py", "fused_weight_gradient_mlp_cuda.py")
    assert apex_state() == "NVIDIA's, with amp_C, fused_weight_gradient_mlp_cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_the_layers_are_local_and_transformer_engine_is_refused():
    assert not use_transformer_engine("auto", torch.bfloat16) and not use_transformer_engine("local", torch.bfloat16)
    with pytest.raises(ConfigError, match="model.transformer_impl: given transformer_engine, but .* needs a GPU"):
        use_transformer_engine("transformer_engine", torch.bfloat16)
    paths = live_paths(use_te=False)
    assert (
        paths["layers"] == "local (torch)"
        and paths["optimizer"] == "torch AdamW"
        and paths["log-probs"] == "torch, in chunks"
    )
