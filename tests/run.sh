#!/usr/bin/env bash
# The whole test suite on the real stack, without a GPU; before it tests/lint.sh, unless pytest's arguments choose tests.
#   tests/run.sh [--all] [pytest arguments]      --all adds the long soaks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup_env.sh test
unset PYTHONDONTWRITEBYTECODE
export CUDA_VISIBLE_DEVICES=""
marks="not gpu and not soak"
if [ "${1:-}" = "--all" ]; then marks="not gpu"; shift; fi
if [ $# -eq 0 ]; then tests/lint.sh; fi
exec .venv/bin/python -m pytest -m "$marks" "$@"
