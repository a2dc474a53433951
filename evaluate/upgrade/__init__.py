"""What NCCL's own cost model would decide otherwise in another release, and its cost."""
