#!/usr/bin/env bash
# What needs a GPU. Uses .venv, or the interpreter that $PYTHON names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-.venv/bin/python}" -m pytest -m gpu tests/gpu -s "$@"
