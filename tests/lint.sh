#!/usr/bin/env bash
# What can be seen without running anything: likely mistakes and layout (ruff), types of the parts that compute and
# decide (mypy), shell scripts (shellcheck), the Dockerfile (hadolint). Half a minute; pyproject.toml has the rules.
#   .venv/bin/ruff check --fix . ; .venv/bin/ruff format .      mends most of what it finds
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
launch/setup_env.sh test || exit 1

failed=""
check() {
  local name=$1 output
  shift
  output=$("$@" 2>&1) && return
  echo "$output"
  failed="$failed, $name"
}

mapfile -t scripts < <(find .ci/run launch tests -type f \( -name '*.sh' -o -name '*.sbatch' -o -path .ci/run \) | sort)
check "ruff check" .venv/bin/ruff check --quiet --output-format concise .
check "ruff format" .venv/bin/ruff format --quiet --check --output-format concise .
check "shellcheck" .venv/bin/shellcheck --shell=bash --external-sources "${scripts[@]}"
check "hadolint" .venv/bin/hadolint Dockerfile
check "mypy" .venv/bin/mypy --no-error-summary
if [ -n "$failed" ]; then
  echo "megarl: found by ${failed#, }: see above. tests/run.sh runs no test before this is mended." >&2
  exit 1
fi
