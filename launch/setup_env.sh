#!/usr/bin/env bash
# Make .venv from constraints.txt, or bring it up to date. Safe to call again: it returns at once when nothing changed.
#   launch/setup_env.sh [extra ...]      extras of setup.py: test, gpu, jobs
# $PYTHON names the interpreter; else Python 3.12 is looked for under python3.12, pyenv, uv and conda.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/find_python.sh
extras=$(IFS=,; echo "$*")

# The stamp holds what was installed, where, and with which extras.
stamp=".venv/.installed"
wanted="$(cat constraints.txt setup.py launch/overrides.txt | sha256sum | cut -d' ' -f1) $PWD "
have=$(cat "$stamp" 2>/dev/null || true)
case "$have" in "$wanted"*) ;; *) have="$wanted" ;; esac
missing=""
for extra in none "$@"; do case " ${have#"$wanted"} " in *" $extra "*) ;; *) missing="$missing$extra " ;; esac; done
if [ -z "$missing" ] && is_python_312 .venv/bin/python; then exit 0; fi

if ! is_python_312 .venv/bin/python; then
  python=$(find_python)
  echo "megarl: making .venv with $("$python" --version)"
  rm -rf .venv
  if command -v uv >/dev/null; then
    uv venv --quiet --python "$python" .venv
  elif ! "$python" -m venv .venv; then
    rm -rf .venv
    echo "megarl: $python cannot make a virtual environment (on Debian: apt-get install python3.12-venv)." >&2
    exit 1
  fi
fi
uv=$(command -v uv || true)
if [ -z "$uv" ]; then
  uv=.venv/bin/uv
  [ -x "$uv" ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv
fi
echo "megarl: installing the stack of constraints.txt (about 9 GB the first time)"
"$uv" pip install --quiet --python .venv/bin/python --constraint constraints.txt --override launch/overrides.txt \
  --build-constraints constraints.txt --editable ".${extras:+[$extras]}"
echo "$have$missing" > "$stamp"
