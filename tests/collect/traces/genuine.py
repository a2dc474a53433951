"""Records real PyTorch traces of two Gloo processes: `python -m ... OUT`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile, schedule

STEPS = 3


def rank_main(rank: int, world: int, port: int, out: Path) -> None:
    """Reduce, gather and broadcast in each step, and leave the trace of each rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    values, gathered = torch.ones(1000), torch.empty(1000 * world)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS - 1, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda p: p.export_chrome_trace(str(out / f"kineto_{rank}.json.gz")),
    ) as profiler:
        for _ in range(STEPS):
            dist.all_reduce(values)
            dist.all_gather_into_tensor(gathered, values)
            dist.broadcast(values, 0)
            profiler.step()
    dist.barrier()
    # Taking down Gloo's threads aborts a process now and then (torch 2.13); all is written.
    os._exit(0)


def main() -> None:
    """Run both ranks."""
    out, port = Path(sys.argv[1]), int(sys.argv[2])
    processes: Any = mp
    processes.spawn(rank_main, (2, port, out), nprocs=2)


if __name__ == "__main__":
    main()
