"""One rank of bench_netsense's job: takes phases from rank 0's stdin, prints a line for each step.

The model is a residual network of fully connected layers: 46.3 MB of gradients, as many as
ResNet-18 has (NetSenseML, section 5.3: 46.2 MB), in three of DDP's buckets, and little arithmetic.
The data are drawn by scikit-learn's `make_classification`: ten classes of two clusters each, 64
features of which 24 tell something. Top-k is the usual one: 32-bit values, error feedback.

A phase is a JSON object: method, steps, and whether the model of the phase before goes on (`keep`);
`schedule` is the number of steps over which the learning rate falls to 0, and `test_every` after
how many steps the test set is looked at.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dynamiccl.serve.ddp import NetSense, Settings, netsense_hook
from dynamiccl.serve.ddp.compression import add_up, compress
from dynamiccl.serve.ddp.laws import DENSE, FP16, Decision, Method

FEATURES: Final = 64
CLASSES: Final = 10
TRAIN: Final = 20_000
TEST: Final = 4_000
#: A rank's samples in a step.
BATCH: Final = 16
#: Width, and how many blocks.
SIZE: Final = (1280, 7)
OURS: Final = "netsense"
METHODS: Final = ("allreduce", "topk-0.1", "topk-0.005", "fp16", OURS)


class Block(nn.Module):
    """x + relu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, width) to (B, width)."""
        found: torch.Tensor = inputs + torch.relu(self.linear(inputs))
        return found


def make_model() -> nn.Module:
    """The model, always the same."""
    width, depth = SIZE
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(FEATURES, width), *blocks, nn.Linear(width, CLASSES))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """(24000, 64) standardised features and their classes; the first 20,000 are for training."""
    features, classes = make_classification(
        n_samples=TRAIN + TEST,
        n_features=FEATURES,
        n_informative=24,
        n_redundant=8,
        n_classes=CLASSES,
        n_clusters_per_class=2,
        class_sep=2.0,
        flip_y=0.0,
        random_state=0,
    )
    features = (features - features.mean(0)) / features.std(0)
    return torch.tensor(features, dtype=torch.float32), torch.tensor(classes)


class TopK:
    """Error feedback and the k largest, by the kernel that NetSense uses."""

    def __init__(self, ratio: float, group: dist.ProcessGroup) -> None:
        self.decision = Decision(Method.SPARSE, ratio)
        self._group = group
        self._residuals: dict[int, torch.Tensor] = {}
        self._turn = 0

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The hook."""
        gradient, ranks = bucket.buffer(), dist.get_world_size(self._group)
        owed = self._residuals.get(bucket.index())
        if owed is None or owed.shape != gradient.shape:
            # DDP makes its buckets anew after the first step, whose rest is dropped here.
            owed = self._residuals[bucket.index()] = torch.zeros_like(gradient)
        self._turn += 1
        sent = compress(gradient, owed, self.decision, turn=self._turn)
        gathered = sent.new_empty(ranks * sent.numel())

        def write(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()
            add_up(gathered, self.decision, ranks, gradient)
            return gradient  # type: ignore[no-any-return]

        work = dist.all_gather_single(gathered, sent, group=self._group, async_op=True)
        found: torch.futures.Future[torch.Tensor] = work.get_future().then(write)
        return found


def topk_hook(state: TopK, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """As `register_comm_hook` takes it; without annotations that DDP would check."""
    return state.exchange(bucket)


topk_hook.__annotations__.clear()


#: What a step tells of itself: of the hook's state, and of what a static method sends.
Told = Callable[[], dict[str, float]]


def use(method: str, model: DistributedDataParallel) -> Told:
    """Register the hook of a method; what tells the bytes that a rank received in a step."""
    group, sizes = model.process_group, [p.numel() for p in model.parameters()]
    ranks = dist.get_world_size(group)
    if method == OURS:
        state = NetSense(model, Settings())
        model.register_comm_hook(state, netsense_hook)
        return state.stats
    decision = FP16 if method == "fp16" else DENSE
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method != "allreduce":
        topk = TopK(float(method.removeprefix("topk-")), group)
        model.register_comm_hook(topk, topk_hook)
        decision = topk.decision
    elif decision is FP16:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    told = {
        "wire_bytes": float(sum([decision.wire_bytes(n, 4, ranks) for n in sizes])),
        "ratio": decision.ratio,
    }
    return lambda: told


LEARNING_RATE: Final = 0.1


@dataclass
class Training:
    """A model in DDP, its optimizer, its hook, and how far it is."""

    model: DistributedDataParallel
    optimizer: torch.optim.SGD
    told: Told
    numbers: torch.Generator
    step: int = 0


def begin(phase: dict[str, Any], rank: int) -> Training:
    """A fresh model under the phase's method; samples by a generator of the rank's own."""
    model = DistributedDataParallel(make_model())
    told = use(phase["method"], model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    return Training(model, optimizer, told, torch.Generator().manual_seed(100 + rank))


def train_step(training: Training, data: tuple[torch.Tensor, torch.Tensor], phase: Any) -> float:
    """One step; the loss."""
    schedule = phase.get("schedule")
    for group in training.optimizer.param_groups:
        left = 1.0 - training.step / schedule if schedule else 1.0
        group["lr"] = LEARNING_RATE * left
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
            say({**line, **training.told()})


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
