#!/usr/bin/env bash
# Everything that a change must pass, from a bare machine on: install, lint, type-check, test.
#
#   bash scripts/test.sh [ARGUMENTS OF PYTEST]
#
# See scripts/setup.sh for the variables PYTHON and TORCH.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh dev
bash scripts/check.sh
.venv/bin/python scripts/make_demo_model.py
exec .venv/bin/python -m pytest "$@"
