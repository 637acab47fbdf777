# syntax=docker/dockerfile:1.7
# megarl with transformer-engine and NVIDIA's apex, for GPUs.
#   docker build -t megarl .                                        most of the time goes into apex's kernels, for each GPU
#   docker build --build-arg TORCH_CUDA_ARCH_LIST=9.0 -t megarl .   for H100 and H200 alone
# How to run it, and which variables a cluster's network needs: launch/README.md.

# The compiler must be of the CUDA version that torch was built with (13.0): apex refuses any other.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04@sha256:ae7f650405a3964972dacfa889273bf8e3fbe9709899afd187da01c4cdff3105 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
# ninja: without it torch compiles extensions one file after another.
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean && apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates git ninja-build python3.12 python3.12-dev python3.12-venv

WORKDIR /opt/megarl
# The cache is a mount, so on another file system: uv would try links in vain. Compiled once here, not at every start.
ENV UV_LINK_MODE=copy \
    UV_COMPILE_BYTECODE=1 \
    UV_PYTHON_DOWNLOADS=never

# What the installed packages depend on, and no more: a changed line of megarl's code reuses these layers.
COPY constraints.txt setup.py README.md ./
COPY launch/find_python.sh launch/overrides.txt launch/setup_env.sh launch/
COPY megarl/__init__.py megarl/
RUN --mount=type=cache,target=/root/.cache/uv launch/setup_env.sh

# transformer-engine: its kernels are a wheel, what binds them to torch is compiled here unless NVIDIA has built it.
# MAX_JOBS: compilers at once, 2 GB of memory each.
ARG MAX_JOBS=8
RUN --mount=type=cache,target=/root/.cache/uv launch/setup_env.sh gpu

# NVIDIA's apex, never the `apex` of PyPI: a commit of master, May 2026. It builds its kernels against the torch that is
# installed, hence without isolation; for A100 (8.0), H100 and H200 (9.0) and B200 (10.0).
ARG TORCH_CUDA_ARCH_LIST="8.0;9.0;10.0"
ARG APEX_COMMIT=becbb77cea4cb54f2929f7c938a0a6f7dd1fdc39
RUN --mount=type=cache,target=/root/.cache/uv \
    APEX_CPP_EXT=1 APEX_CUDA_EXT=1 uv pip install --python .venv/bin/python --no-deps --no-build-isolation \
    "apex @ git+https://github.com/NVIDIA/apex@${APEX_COMMIT}"
COPY megarl megarl/
RUN .venv/bin/python - <<'CHECK'
# All that Megatron-Core looks for is there, under the names that it looks for. Imports need a GPU's driver: not here.
from importlib.metadata import version

from megarl.engine.fused import apex_state

state = apex_state()
assert state == "NVIDIA's, with amp_C, fused_weight_gradient_mlp_cuda", f"apex is {state}"
assert version("transformer-engine-torch") == version("transformer-engine") == version("transformer-engine-cu13")
CHECK

# CUDA's libraries, cuDNN and NCCL come with torch's wheels: this base has none, the other one all of them a second time.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04@sha256:2ab6381d970b211fb93853796dc6707eb8a72575a375c422b17cf4d8b2641701
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# SGLang and Triton compile kernels for the GPU that they find: nvcc, its headers, a C++ compiler, Python's headers.
# libibverbs, librdmacm: without them NCCL leaves InfiniBand and RoCE alone, in silence. tini: reaps what PID 1 inherits.
RUN --mount=type=cache,target=/var/cache/apt,sharing=locked --mount=type=cache,target=/var/lib/apt,sharing=locked \
    rm -f /etc/apt/apt.conf.d/docker-clean && apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates cuda-minimal-build-13-0 cuda-nvrtc-dev-13-0 g++ ibverbs-providers libcublas-dev-13-0 \
        libcurand-dev-13-0 libibverbs1 libnuma1 librdmacm1t64 python3.12 python3.12-dev tini

# Of the user who builds by preference, so that what a run writes to a mounted folder is theirs: --build-arg USER_ID=$(id -u).
ARG USER_ID=1000
RUN if getent passwd ubuntu; then userdel --remove ubuntu; fi \
    && useradd --create-home --shell /bin/bash --uid "${USER_ID}" megarl \
    && install --directory --owner=megarl /workspace

COPY --from=build /opt/megarl/.venv /opt/megarl/.venv
COPY . /opt/megarl
# CUDA_HOME: the compiler of torch's CUDA version, not the newer one among the Python packages, whose PTX the drivers of
# CUDA 13.0 refuse. NCCL_DEBUG=WARN: NCCL's errors with their reason in the log of the rank, and not a line while all is
# well. Which network NCCL uses is a property of the cluster and not of an image: see launch/README.md.
ENV PATH=/opt/megarl/.venv/bin:/usr/local/cuda/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    PYTHONUNBUFFERED=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NCCL_DEBUG=WARN

ARG REVISION=unknown
LABEL org.opencontainers.image.title="megarl" \
      org.opencontainers.image.description="RL post-training of large language models: Megatron-Core, SGLang, Ray" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/nvidia/cuda:13.0.2-base-ubuntu24.04"

USER ${USER_ID}
WORKDIR /workspace
RUN megarl train /opt/megarl/configs/quickstart.yaml --dry-run

HEALTHCHECK --interval=60s --timeout=30s --start-period=120s --retries=3 CMD ["python", "/opt/megarl/launch/healthcheck.py"]
ENTRYPOINT ["tini", "--"]
CMD ["megarl", "--help"]
