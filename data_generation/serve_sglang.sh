#!/usr/bin/env bash
# Serve a base model with SGLang on this machine for `medusa-distill generate --server`.
#
#   bash data_generation/serve_sglang.sh MODEL [OPTIONS OF sglang.launch_server]
#
# Needs SGLang (pip install "sglang[all]") in an environment of its own. Its own router spreads the
# requests over the GPUs: add --dp-size N for one copy of the model on each of N GPUs.
# PORT  the server's port (default 30000)
set -euo pipefail
model="${1:?give a model: a hub id or a directory}"
shift
port="${PORT:-30000}"
echo "medusa-distill generate ... --server http://localhost:$port/v1" >&2
# openai: sampling comes from the requests alone, not from the model's files.
exec python -m sglang.launch_server --model-path "$model" --port "$port" \
    --sampling-defaults openai "$@"
