#!/bin/bash
# A PyTorch job under DynamICCL on Slurm: two nodes of eight GPUs. Submit it with sbatch.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500

# What all nodes must agree on, counted before the job: one line where all are alike.
srun @DIR@/bin/dynamiccl-prepare --facts @DIR@/artifact | sort | uniq -c || true

# Each rank starts through dynamiccl-run: it prepares the node that it runs on, and rank 0 starts the
# arbiter, by which ranks of several nodes agree.
srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" \
  --no-python @DIR@/bin/dynamiccl-run python train.py

# One process for each GPU, started by Slurm itself, needs no torchrun:
#   srun --ntasks-per-node=8 @DIR@/bin/dynamiccl-run python train.py
# Watch what happens without touching anything:
#   srun ... @DIR@/bin/dynamiccl-run --mode observe python train.py
