"""CPU answer to sglang-kernel's last resort, `import common_ops`.

`sgl_kernel.load_utils` tries the CUDA libraries of its wheel first and then a plain `import common_ops`. The wheel on
PyPI holds CUDA libraries only; without libcuda.so.1 they do not load, and this module answers instead. It registers
no operator on purpose: dense models on the torch_native backend call none, and a path that needs one fails loudly
with AttributeError on `torch.ops.sgl_kernel`. Where CUDA is present this file is never imported.
"""
