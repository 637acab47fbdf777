import types

import pytest

from megarl.engine import cpu_compat


def test_a_listed_function_that_names_cuda_no_more_is_an_error(monkeypatch):
    module = types.ModuleType("changed")
    exec("def moved(): return 'meta'", vars(module))
    monkeypatch.setitem(__import__("sys").modules, "changed", module)
    with pytest.raises(RuntimeError, match="changed.moved names CUDA no more"):
        cpu_compat._retarget("changed", "moved")


def test_another_megatron_version_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_compat, "MEGATRON_VERSION", "0.0.1")
    with pytest.raises(RuntimeError, match="needs megatron-core 0.0.1, found 0"):
        cpu_compat.install()


def test_only_names_and_literals_of_cuda_are_swapped():
    def function(torch):
        return torch.cuda.current_device(), "cuda", "cuda is not this", ("cuda", 1)

    names = cpu_compat._swap_cuda(function.__code__)
    assert "cpu" in names.co_names and "cuda" not in names.co_names
    assert "cuda is not this" in names.co_consts and "cpu" in names.co_consts and ("cpu", 1) in names.co_consts
