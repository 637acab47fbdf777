#!/usr/bin/env bash
# Make .venv from constraints.txt, or bring it up to date. Safe to call again: it returns at once when nothing changed.
#   launch/setup_env.sh [extra ...]      extras of setup.py: test, gpu
# $PYTHON names the interpreter; else Python 3.12 is looked for under python3.12, pyenv, uv and conda.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=$(IFS=,; echo "$*")

is_312() { [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    is_312 "$PYTHON" && { command -v "$PYTHON"; return; }
    echo "megarl: PYTHON=$PYTHON is not a Python 3.12 that runs." >&2
    return 1
  fi
  local candidate
  for candidate in python3.12 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python \
    "$(command -v uv >/dev/null && uv python find 3.12 2>/dev/null || true)" \
    "${CONDA_PREFIX:-/nonexistent}/bin/python" \
    "$(command -v conda >/dev/null && conda info --base 2>/dev/null || true)"{/bin/python,/envs/*/bin/python}; do
    if is_312 "$candidate"; then command -v "$candidate"; return; fi
  done
  cat >&2 <<'MESSAGE'
megarl: no Python 3.12 found (looked for python3.12, pyenv, uv and conda). Any one of these provides it:
  apt-get install python3.12 python3.12-venv     uv python install 3.12
  pyenv install 3.12                             conda create -n py312 python=3.12
or name one yourself: PYTHON=/path/to/python3.12
MESSAGE
  return 1
}

stamp=".venv/.installed"
wanted="$(cat constraints.txt setup.py launch/overrides.txt | sha256sum | cut -d' ' -f1) "
have=$(cat "$stamp" 2>/dev/null || true)
case "$have" in "$wanted"*) ;; *) have="$wanted" ;; esac
missing=""
for extra in none "$@"; do case " $have " in *" $extra "*) ;; *) missing="$missing$extra " ;; esac; done
if [ -z "$missing" ] && .venv/bin/python -c 'import megarl' 2>/dev/null; then exit 0; fi

if ! is_312 .venv/bin/python; then
  python=$(find_python)
  echo "megarl: making .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv || { echo "megarl: $python cannot make a virtual environment (on Debian: apt-get install python3.12-venv)." >&2; exit 1; }
fi
if command -v uv >/dev/null; then uv=uv; else
  uv=.venv/bin/uv
  [ -x "$uv" ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
echo "megarl: installing the stack of constraints.txt (about 9 GB the first time)"
"$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --override launch/overrides.txt \
  --editable ".${extras:+[$extras]}"
echo "$have$missing" > "$stamp"
