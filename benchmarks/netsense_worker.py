"""One rank of bench_netsense's job: takes phases from rank 0's stdin, prints a line for each step.

A phase is a JSON object: method, size (width, depth), steps, and whether the model of the phase
before goes on (`keep`); `schedule` is the number of steps over which the learning rate falls to 0,
and `test_every` after how many steps the test set is looked at.
"""

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from netsense_training import (
    BATCH,
    TEST,
    TRAIN,
    Adaptive,
    Static,
    cap_mb,
    make_data,
    make_model,
    use,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE: Final = 0.1


@dataclass
class Training:
    """A model in DDP, its optimizer, its hook, and how far it is."""

    model: DistributedDataParallel
    optimizer: torch.optim.SGD
    hook: Static | Adaptive
    numbers: torch.Generator
    step: int = 0


def begin(phase: dict[str, Any], rank: int) -> Training:
    """A fresh model under the phase's method; samples by a generator of the rank's own."""
    module = make_model(tuple(phase["size"]))
    model = DistributedDataParallel(module, bucket_cap_mb=cap_mb(phase["method"]))
    hook = use(phase["method"], model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return Training(model, optimizer, hook, torch.Generator().manual_seed(100 + rank))


def train_step(training: Training, data: tuple[torch.Tensor, torch.Tensor], phase: Any) -> float:
    """One step; the loss."""
    schedule = phase.get("schedule")
    for group in training.optimizer.param_groups:
        left = 1.0 - training.step / schedule if schedule else 1.0
        group["lr"] = LEARNING_RATE * left * phase.get("rate_factor", 1.0)
    features, classes = data
    chosen = torch.randint(0, TRAIN, (BATCH,), generator=training.numbers)
    training.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(training.model(features[chosen]), classes[chosen])
    loss.backward()  # type: ignore[no-untyped-call]
    training.optimizer.step()
    training.step += 1
    return float(loss.detach())


def accuracy(training: Training, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """On the whole test set, of which each rank takes a part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    features, classes = (each[TRAIN:][rank::ranks] for each in data)
    with torch.no_grad():
        right = (training.model.module(features).argmax(1) == classes).sum()
    dist.all_reduce(right)
    return int(right) / TEST


def run_phase(training: Training, data: Any, phase: dict[str, Any], rank: int) -> None:
    """The steps of a phase; rank 0 prints each."""
    for number in range(phase["steps"]):
        start = time.monotonic()
        loss = train_step(training, data, phase)
        seconds = time.monotonic() - start
        line = {"step": training.step, "seconds": seconds, "loss": loss}
        every = phase.get("test_every")
        if every and (training.step % every == 0 or number == phase["steps"] - 1):
            line["accuracy"] = accuracy(training, data)
        if rank == 0:
            say({**line, **training.hook.figures(training.model, training.step - 1)})


def say(line: dict[str, Any]) -> None:
    """One JSON line for the driver."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Phases until there is none."""
    parser = argparse.ArgumentParser()
    for name in ("--rank", "--ranks"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--master", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=args.master, rank=args.rank, world_size=args.ranks)
    data, training = make_data(), None
    while True:
        told: list[Any] = [json.loads(sys.stdin.readline())] if args.rank == 0 else [None]
        dist.broadcast_object_list(told)
        phase = told[0]
        if not phase:
            break
        if training is None or not phase.get("keep"):
            training = None
            gc.collect()
            training = begin(phase, args.rank)
        run_phase(training, data, phase, args.rank)
        dist.barrier()
        if args.rank == 0:
            say({"end": True})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
