"""One rank of nccl_ranks.py's jobs: all-reduces of every size until STOP_FILE is there.

Exits with 3 when a sum is not bit for bit what it must be.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.gpu.nccl_job import sums_are_exact

SIZES_BYTES = [1 << power for power in range(12, 23, 2)]


def main() -> int:
    """Take part until rank 0 sees the file; the ranks hear of it through NCCL as well."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    stop_file = Path(os.environ["STOP_FILE"])
    stops = False
    while not stops:
        for size in SIZES_BYTES:
            data = torch.full((size // 4,), float(rank + 1), device="cuda")
            dist.all_reduce(data)
            if not sums_are_exact(ranks, [data.min().item(), data.max().item()]):
                return 3
        flag = torch.tensor([float(rank == 0 and stop_file.exists())], device="cuda")
        dist.all_reduce(flag)
        stops = bool(flag.item() > 0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
