"""One rank of test_step.py's jobs: steps of matrix products with an all-reduce beside them.

Rank 0 writes the median step, in us, to STEP_FILE.
"""

import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, WARMUP = 30, 10


def main() -> None:
    """Take part in all steps."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda: Any = torch.cuda
    cuda.set_device(rank % cuda.device_count())
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
