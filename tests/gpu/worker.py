"""One rank of the jobs of ranks.py.

sums   all-reduces of every size until STOP_FILE is there; exits with 3 when a sum is not bit for
       bit what it must be
steps  matrix products with an all-reduce beside them; rank 0 writes the median step, in us, to
       STEP_FILE
"""

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SIZES_BYTES = [1 << power for power in range(12, 23, 2)]
STEPS, WARMUP = 30, 10


def take_sums(rank: int, ranks: int) -> int:
    """Take part until rank 0 sees the file; the ranks hear of it through NCCL as well."""
    stop_file, stops = Path(os.environ["STOP_FILE"]), False
    while not stops:
        for size in SIZES_BYTES:
            data = torch.full((size // 4,), float(rank + 1), device="cuda")
            dist.all_reduce(data)
            if {data.min().item(), data.max().item()} != {ranks * (ranks + 1) / 2}:
                return 3
        flag = torch.tensor([float(rank == 0 and stop_file.exists())], device="cuda")
        dist.all_reduce(flag)
        stops = bool(flag.item() > 0)
    return 0


def take_steps(rank: int) -> int:
    """Take part in all steps."""
    cuda: Any = torch.cuda
    edge, products = int(os.environ["EDGE"]), int(os.environ["PRODUCTS"])
    a, b, product = (torch.randn(edge, edge, device="cuda").bfloat16() for _ in range(3))
    data = torch.zeros(int(os.environ["SIZE_BYTES"]) // 4, device="cuda")
    took_us = []
    for _ in range(WARMUP + STEPS):
        cuda.synchronize()
        dist.barrier()
        cuda.synchronize()
        first, last = (cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work = dist.all_reduce(data, async_op=True)
        for _ in range(products):
            torch.mm(a, b, out=product)
        assert work is not None
        work.wait()
        last.record()
        cuda.synchronize()
        took_us.append(1e3 * first.elapsed_time(last))
    slowest = torch.tensor(took_us[WARMUP:], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(os.environ["STEP_FILE"]).write_text(str(statistics.median(slowest.tolist())))
    return 0


def main() -> int:
    """Run what the one argument names."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    code = take_sums(rank, ranks) if sys.argv[1] == "sums" else take_steps(rank)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
