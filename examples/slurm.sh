#!/usr/bin/env bash
# Trains on several nodes of 8 GPUs: sbatch --nodes 4 examples/slurm.sh
#SBATCH --job-name dash
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --signal B:TERM@300
set -euo pipefail

# Every node runs one torchrun, and they meet at the first node. `--max-restarts 0`: a failed process ends the job, and
# the next one goes on from the checkpoint.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
folder=${RUN:-runs/llama-1b}
if [ -f "$folder/checkpoint.pt" ]; then
  arguments=(--resume "$folder")
else
  arguments=(--folder "$folder" --model llama-1b --data "${DATA:?a text, or a .bin file of tokens}" --strategy fsdp
    --batch-size 512 --steps 20000 --save-every 500)
fi

# Slurm's TERM five minutes before the end reaches every process, which saves after its step. Newer versions of torchrun
# give them this many seconds for it, older ones 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
trap 'kill -TERM "$pid"; wait "$pid"' TERM
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 0 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head:29500" \
  -m dash_shampoo train "${arguments[@]}" &
pid=$!
wait "$pid"
