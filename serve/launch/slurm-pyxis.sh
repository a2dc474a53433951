#!/bin/bash
# A PyTorch job in a container (Pyxis, enroot) under DynamICCL: two nodes of eight GPUs.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
set -euo pipefail

#   IMAGE  the container's image.
#   SLURM_LOCALID  Slurm: the rank on its node, handed on as LOCAL_RANK.
IMAGE=${IMAGE:-nvcr.io#nvidia/pytorch:25.08-py3}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500

# Mounted at the same place, read-only. It must belong to the user who submits: inside an enroot
# container the files of root and of other users show as nobody's, and then the plugin abstains.
srun --container-image="$IMAGE" --container-mounts=@DIR@:@DIR@:ro \
  bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS \
    exec @DIR@/bin/dynamiccl-run python train.py'
