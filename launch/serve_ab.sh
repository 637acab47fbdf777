#!/usr/bin/env bash
# Two exported models behind one address, split by weight, each answer logged with the model that gave it.
#   launch/serve_ab.sh MODEL_A MODEL_B [--weight-b 0.1] [--port 30000] [--log ab.jsonl] [-- SGLang's options]
# --help shows all options.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/launch/setup_env.sh"
unset PYTHONDONTWRITEBYTECODE
exec "$root/.venv/bin/python" -m megarl.rollout.serve_ab "$@"
