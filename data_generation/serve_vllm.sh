#!/usr/bin/env bash
# Serve a base model with vLLM on every GPU of this machine, one server a GPU, for
# `medusa-distill generate --server`.
#
#   bash data_generation/serve_vllm.sh MODEL [OPTIONS OF vllm serve]
#
# Needs vLLM (pip install vllm) in an environment of its own.
# GPUS       the GPUs to use, such as "0 1 2 3" (default: all that nvidia-smi lists)
# FIRST_PORT the first server's port (default 8000); the others follow it
#
# It prints the options for medusa-distill and runs until Ctrl-C, which stops all servers.
set -euo pipefail
model="${1:?give a model: a hub id or a directory}"
shift
gpus="${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader | tr '\n' ' ')}"
port="${FIRST_PORT:-8000}"

trap 'kill 0' EXIT
options=()
for gpu in $gpus; do
    # --generation-config vllm: sampling comes from the requests alone, not from the model's files.
    # raw_logprobs: log-probabilities before temperature, which is what a teacher is.
    CUDA_VISIBLE_DEVICES="$gpu" vllm serve "$model" --port "$port" \
        --generation-config vllm --logprobs-mode raw_logprobs --max-logprobs 20 "$@" &
    options+=(--server "http://localhost:$port/v1")
    port=$((port + 1))
done
echo "medusa-distill generate ... ${options[*]}" >&2
wait
