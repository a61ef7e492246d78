#!/usr/bin/env bash
# Lint, formatting, types and the import contracts; needs the installation of scripts/setup.sh dev.
set -euo pipefail
cd "$(dirname "$0")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/lint-imports
