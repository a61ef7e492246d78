#!/usr/bin/env bash
# Everything that a change must pass, from a bare machine on: install, lint, type-check, test.
#
#   bash scripts/test.sh [ARGUMENTS OF PYTEST]
#
# See scripts/setup.sh for the variables PYTHON and TORCH; PROCESSES is how many run tests (2).
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh dev
bash scripts/check.sh
.venv/bin/python scripts/make_demo_model.py
# Two processes, each with one thread: the tests' models are too small for more.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest --numprocesses "${PROCESSES:-2}" --dist loadfile "$@"
