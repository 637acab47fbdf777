#!/usr/bin/env bash
# GRPO end to end on the real stack, on this machine's CPU: a toy model learns to work sums out instead of guessing.
#   launch/quickstart.sh [key.path=value ...]      e.g. seed=2 name=quickstart-seed2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
launch/setup_env.sh
unset PYTHONDONTWRITEBYTECODE
name="name=quickstart-$(date +%Y%m%d-%H%M%S)"  # a run never overwrites another
for argument in "$@"; do case "$argument" in name=*) name="" ;; esac; done
exec .venv/bin/megarl train configs/quickstart.yaml ${name:+"$name"} "$@"
