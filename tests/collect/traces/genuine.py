"""Records real PyTorch traces of two Gloo processes: `python -m ... OUT`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, schedule

STEPS = 3


def rank_main(rank: int, world: int, port: int, out: Path) -> None:
    """Reduce, gather and broadcast in each step, and leave three kinds of traces."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    observer = ExecutionTraceObserver().register_callback(str(out / f"et_{rank}.json"))
    observer.start()
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
    observer.stop()
    observer.unregister_callback()
    dump: Any = torch._C._distributed_c10d
    (out / f"pickle_rank_{rank}").write_bytes(dump._dump_fr_trace())
    text = dump._dump_fr_trace_json()
    (out / f"json_rank_{rank}").write_bytes(text if isinstance(text, bytes) else text.encode())
    dist.barrier()
    # Taking down Gloo's threads aborts a process now and then (torch 2.13); all is written.
    os._exit(0)


def main() -> None:
    """Run both ranks."""
    out, port = Path(sys.argv[1]), int(sys.argv[2])
    os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
    processes: Any = mp
    processes.spawn(rank_main, (2, port, out), nprocs=2)


if __name__ == "__main__":
    main()
