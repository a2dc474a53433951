"""The gradient hook on NCCL over TCP sockets, on GPUs: real DDP jobs.

    pytest -s -m gpu tests/gpu/test_ddp.py

It needs a CUDA build of torch with NCCL 2.19 or later, and takes two minutes. As many ranks as
GPUs, or two that share one, meet through sockets on the loopback. Printed: a step's time with
DDP's own all-reduce and with the hook, on a net of 46 MB; the loopback is no slow network.
With NCCL_TESTS_STAND_IN=1 the same job runs on CPUs and gloo, to check the test itself.
"""

import os
import statistics
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiccl.serve.ddp import DeviceClock, NetSense, Settings, netsense_hook
from tests.gpu.ranks import STAND_IN, run_each, skip_without_nccl

pytestmark = pytest.mark.gpu

STEPS, WARMUP = 30, 10
WIDTH, DEPTH = (64, 2) if STAND_IN else (1280, 7)


def test_the_hook_trains_on_nccl_over_sockets() -> None:
    if not STAND_IN:
        skip_without_nccl((2, 19))
    # Which of ours and NCCL's are left out there.
    common = {"NCCL_TESTS_STAND_IN": "1"} if STAND_IN else {}
    run_each([sys.executable, __file__], [common] * max(2, torch.cuda.device_count()))


class Streams(DeviceClock):
    """Knows on which stream each mark was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[torch.cuda.Event, torch.cuda.Stream] = {}

    def _event(self) -> torch.cuda.Event:
        event = super()._event()
        self.of[event] = torch.cuda.current_stream()
        return event


def make(device: torch.device) -> DistributedDataParallel:
    """The same weights on every rank and at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    return DistributedDataParallel(nn.Sequential(*layers).to(device))


def train(model: DistributedDataParallel, rank: int, device: torch.device) -> list[float]:
    """The seconds of each step."""
    optimizer, took = torch.optim.SGD(model.parameters(), 0.01), []
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        inputs = torch.randn(16, WIDTH, generator=drawn).to(device)
        start = time.monotonic()
        optimizer.zero_grad()
        loss = ((model(inputs) - inputs) ** 2).mean()
        loss.backward()
        optimizer.step()
        float(loss.detach())
        took.append(time.monotonic() - start)
    return took


def weights(model: DistributedDataParallel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def take_part() -> None:
    """One rank: what differs raises."""
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if not STAND_IN:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if STAND_IN else "nccl")
    found = {}
    for name, settings in (
        ("all-reduce", None),
        ("dense", Settings(start_ratio=1.0, slowdown=1e9)),
        ("shared", Settings(shared=True)),
        ("own", Settings(shared=False)),
        ("paper", Settings(mode="paper")),
    ):
        model = make(device)
        clock = None if STAND_IN else Streams()
        state = NetSense(model, settings, clock=clock) if settings else None
        if state:
            model.register_comm_hook(state, netsense_hook)
        seconds = statistics.median(train(model, rank, device)[WARMUP:])
        found[name] = weights(model)
        mine = [torch.empty_like(found[name]) for _ in range(dist.get_world_size())]
        dist.all_gather(mine, found[name])
        assert all(torch.equal(each, mine[0]) for each in mine), name
        assert torch.isfinite(found[name]).all(), name
        told = state.stats() if state else {}
        if state:
            assert told["steps"] == STEPS
        if state and clock:
            # On the compute stream, backward would wait for each exchange.
            for bucket in state._step.buckets:
                assert clock.of[bucket.launched] != clock.of[bucket.done], name
        if rank == 0:
            print(f"{name:10} {1e3 * seconds:8.2f} ms a step, ratio {told.get('ratio', 1.0):.4f}")
    assert torch.equal(found["dense"], found["all-reduce"])
    dist.destroy_process_group()


if __name__ == "__main__":
    take_part()
