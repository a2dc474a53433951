"""Real ranks for tests of the hook: processes with a gloo group over loopback."""

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: A job of a rank: (rank, arguments) -> what the test looks at.
Job = Callable[[int, Any], Any]
JOB_LIMIT_S = 120.0
ROOT = str(Path(__file__).resolve().parents[3])


def run_ranks(job: Job, ranks: int, folder: Path, argument: Any = None) -> list[Any]:
    """What each rank returned; None for a rank that was killed. An exception is the test's."""
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("forkserver")
    # One import for all ranks of all tests; DDP's constructor wants the second, for two seconds.
    context.set_forkserver_preload(["dynamiccl.serve.ddp", "torch._dynamo.distributed"])
    processes = [
        context.Process(target=_rank, args=(job, rank, ranks, str(folder), argument))
        for rank in range(ranks)
    ]
    with pytest.MonkeyPatch.context() as patch:
        # pytest's importlib mode has no root on the path, and ranks must find `tests`.
        patch.syspath_prepend(ROOT)
        for process in processes:
            process.start()
    for process in processes:
        process.join(JOB_LIMIT_S)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, f"{len(late)} of {ranks} ranks were still running after {JOB_LIMIT_S} s"
    found: list[Any] = []
    for rank, process in enumerate(processes):
        path = folder / f"rank-{rank}"
        if process.exitcode == -signal.SIGKILL:
            found.append(None)
            continue
        error, value = pickle.loads(path.read_bytes())
        assert not error, f"rank {rank}: {error}"
        found.append(value)
    return found


def _rank(job: Job, rank: int, ranks: int, folder: str, argument: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = Path(folder)
    error, value = "", None
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place / 'meet'}", rank=rank, world_size=ranks
        )
        value = job(rank, argument)
        dist.destroy_process_group()
    except Exception:
        error = traceback.format_exc()
    (place / f"rank-{rank}").write_bytes(pickle.dumps((error, value)))
    # Without this a rank whose peer is gone waits for its group's threads.
    os._exit(0)


def small_model(seed: int = 0, **options: Any) -> DistributedDataParallel:
    """Three layers, 1,410 parameters, in DDP; equal on all ranks."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)]
    return DistributedDataParallel(nn.Sequential(*layers), **options)


def step_of(model: DistributedDataParallel, rank: int, step: int) -> torch.Tensor:
    """One backward pass on a rank's own numbers of a step; the loss."""
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(16, 8, generator=numbers)
    target = inputs[:, :2].sum(1, keepdim=True)
    loss = cast("torch.Tensor", ((model(inputs) - target) ** 2).mean())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def weights(model: DistributedDataParallel) -> torch.Tensor:
    """All parameters, one after the other."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(model: DistributedDataParallel) -> torch.Tensor:
    """All gradients, one after the other."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
