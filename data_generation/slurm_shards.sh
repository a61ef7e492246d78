#!/usr/bin/env bash
# One generation on many machines: each task of a job array does its part, in process on its GPU.
#
#   sbatch --array=0-7 --gres=gpu:1 data_generation/slurm_shards.sh CONFIG.yaml OUT [OPTIONS]
#   medusa-distill merge OUT/shard-* OUT/data        when all tasks are done
#
# A task that was killed goes on where it stopped: submit it again (sbatch --array=3 …
# with SHARDS=8, since the number of parts must stay the same).
# SHARDS  the number of parts (default: the size of the array)
#
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
set -euo pipefail
config="${1:?give a generation config}"
out="${2:?give an output directory that all machines see}"
shift 2
part="$SLURM_ARRAY_TASK_ID"
parts="${SHARDS:-$SLURM_ARRAY_TASK_COUNT}"
# exec: the signal that warns of the time limit must reach medusa-distill, which then finishes its
# block and ends.
exec medusa-distill generate "$config" --output "$out/shard-$part" --shard "$part/$parts" "$@"
