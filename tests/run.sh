#!/usr/bin/env bash
# The whole test suite on the real stack, without a GPU.
#   tests/run.sh [--all] [pytest arguments]      --all adds the long soaks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup_env.sh test
unset PYTHONDONTWRITEBYTECODE
export CUDA_VISIBLE_DEVICES=""
marks="not gpu and not soak"
if [ "${1:-}" = "--all" ]; then marks="not gpu"; shift; fi
exec .venv/bin/python -m pytest -m "$marks" "$@"
