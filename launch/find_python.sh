# find_python: print a Python 3.12 of this machine, or say how to get one and fail. To be sourced.

is_python_312() { [ -n "$1" ] && "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

how_to_get_python_312() {
  cat >&2 <<'MESSAGE'
Any one of these provides it:
  apt-get install python3.12 python3.12-venv     uv python install 3.12
  pyenv install 3.12                             conda create -n py312 python=3.12
or name one yourself: PYTHON=/path/to/python3.12
MESSAGE
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    if is_python_312 "$PYTHON"; then command -v "$PYTHON"; return; fi
    echo "megarl: PYTHON=$PYTHON is not Python 3.12 but $("$PYTHON" --version 2>&1 || echo 'nothing that runs')." >&2
    how_to_get_python_312
    return 1
  fi
  local candidate
  for candidate in python3.12 python3 \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python \
    "$(uv python find 3.12 2>/dev/null || true)" \
    "${CONDA_PREFIX:-/nonexistent}/bin/python" \
    "$("${CONDA_EXE:-conda}" info --base 2>/dev/null || true)"{/bin/python,/envs/*/bin/python}; do
    if is_python_312 "$candidate"; then command -v "$candidate"; return; fi
  done
  echo "megarl: no Python 3.12 found (looked for python3.12, pyenv, uv and conda)." >&2
  how_to_get_python_312
  return 1
}
