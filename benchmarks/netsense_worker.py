"""One rank of bench_netsense's job: takes phases from rank 0's stdin, prints a line for each step.

A phase is a JSON object: model, method, steps, seed, and whether the model of the phase before goes
on (`keep`); over `schedule` steps the learning rate falls to 0, after each `test_every` is a test.

digits  scikit-learn's 1,797 images of 8 x 8; by seed one half for training and one for the test.
        Three convolutions and two linear layers, 0.36 MB of gradients.
wide    residual, fully connected, random inputs: 46.3 MB of gradients, as ResNet-18's (NetSenseML,
        section 5.3), in three of DDP's buckets, and little arithmetic.

`topk-K` is the usual one: each rank's own largest in 32 bits, by an all-gather, with error
feedback as NetSense's; `static-K` is NetSense's exchange at a ratio that stays.
"""

import gc
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from dynamiccl.serve.ddp import HostClock, NetSense, Settings, netsense_hook, sent_again
from dynamiccl.serve.ddp.compression import Residuals, largest

#: A rank's samples in a step.
BATCH: Final = 8
CLASSES: Final = 10
#: Features of the wide net, its width, and how many blocks.
WIDE: Final = (64, 1280, 7)
LEARNING_RATES: Final = {"digits": 0.5, "wide": 0.1}
FLOOD_PORT: Final = 29_512
OURS: Final = "netsense"
Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """x + relu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, width) to (B, width)."""
        found: torch.Tensor = inputs + torch.relu(self.linear(inputs))
        return found


def make_model(name: str, seed: int) -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(seed)
    if name == "wide":
        features, width, depth = WIDE
        blocks = [Block(width) for _ in range(depth)]
        return nn.Sequential(nn.Linear(features, width), *blocks, nn.Linear(width, CLASSES))
    layers: list[nn.Module] = []
    for before, after, last in ((1, 16, nn.Identity()), (16, 32, nn.MaxPool2d(2)), (32, 64, None)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), last or nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def make_data(name: str, seed: int) -> Data:
    """Inputs and classes for training, then for the test."""
    if name == "wide":
        inputs, classes = torch.randn(512, WIDE[0]), torch.randint(0, CLASSES, (512,))
        return inputs, classes, inputs, classes
    digits = load_digits()
    inputs, classes = torch.tensor(digits.images).float()[:, None] / 16, torch.tensor(digits.target)
    drawn = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    train, test = drawn[: len(drawn) // 2], drawn[len(drawn) // 2 :]
    return inputs[train], classes[train], inputs[test], classes[test]


class TopK:
    """Error feedback and a rank's own k largest."""

    def __init__(
        self, ratio: float, group: dist.ProcessGroup, optimizer: torch.optim.Optimizer
    ) -> None:
        self.ratio = ratio
        self._group, self._optimizer = group, optimizer
        self._residuals, self._rate = Residuals(), float(optimizer.param_groups[0]["lr"])
        self._turn = 0

    def exchange(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The hook."""
        gradient, ranks = bucket.buffer(), dist.get_world_size(self._group)
        rate = float(self._optimizer.param_groups[0]["lr"])
        if rate and rate != self._rate:
            self._residuals.scale(self._rate / rate)
            self._rate = rate
        layout = tuple((str(id(each)), each.numel()) for each in bucket.parameters())
        owed = self._residuals.of(layout, gradient.device)
        self._turn += 1
        owed.add_(gradient)
        count = max(1, int(self.ratio * len(owed)))
        places = largest(owed, count, self._turn)[0]
        sent = torch.zeros(2 * count, dtype=torch.int32)
        sent[: len(places)] = places.int()
        sent[count:].view(torch.float32)[: len(places)] = owed[places]
        owed[places] = 0.0
        gathered = sent.new_empty(ranks * len(sent))

        def write(future: torch.futures.Future[Any]) -> torch.Tensor:
            future.value()
            gradient.zero_()
            for told in gathered.chunk(ranks):
                values = told[count:].view(torch.float32)
                gradient.index_add_(0, told[:count], values, alpha=1.0 / ranks)
            return gradient  # type: ignore[no-any-return]

        work = dist.all_gather_single(gathered, sent, group=self._group, async_op=True)
        found: torch.futures.Future[torch.Tensor] = work.get_future().then(write)
        return found


#: What a step tells of the hook's state.
Told = Callable[[], dict[str, float]]


def use(method: str, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Told:
    """Register the hook of a method; what tells of it."""
    name, _, ratio = method.partition("-")
    if name in (OURS, "static"):
        settings, clock = Settings(), None
        if ratio:
            # A clock that stands still measures nothing, so nothing changes.
            settings, clock = Settings(start_ratio=float(ratio)), HostClock(lambda: 0.0)
        state = NetSense(model, settings, optimizer=optimizer, clock=clock)
        model.register_comm_hook(state, netsense_hook)
        return state.stats
    if name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "topk":
        rival = TopK(float(ratio), model.process_group, optimizer)
        # Without annotations, which DDP would check.
        model.register_comm_hook(rival, lambda state, bucket: state.exchange(bucket))
    return dict


class Training:
    """A fresh model in DDP under a phase's method, its data, and how far it is."""

    def __init__(self, phase: dict[str, Any], rank: int) -> None:
        name, seed = phase["model"], phase.get("seed", 0)
        self.model = DistributedDataParallel(make_model(name, seed))
        self.optimizer = torch.optim.SGD(self.model.parameters(), LEARNING_RATES[name])
        self.told = use(phase["method"], self.model, self.optimizer)
        # Samples are drawn by a generator of the rank's own.
        self.numbers = torch.Generator().manual_seed(1000 * seed + rank)
        self.data, self.step = make_data(name, seed), 0

    def train(self, phase: dict[str, Any]) -> float:
        """One step; the loss."""
        schedule = phase.get("schedule")
        for group in self.optimizer.param_groups:
            left = 1.0 - self.step / schedule if schedule else 1.0
            group["lr"] = LEARNING_RATES[phase["model"]] * left
        inputs, classes, *_ = self.data
        chosen = torch.randint(0, len(classes), (BATCH,), generator=self.numbers)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(inputs[chosen]), classes[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.step += 1
        return float(loss.detach())

    def accuracy(self) -> float:
        """On the whole test set, of which each rank takes a part."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        inputs, classes = (each[rank::ranks] for each in self.data[2:])
        with torch.no_grad():
            right = (self.model.module(inputs).argmax(1) == classes).sum()
        dist.all_reduce(right)
        return int(right) / len(self.data[3])

    def run(self, phase: dict[str, Any], rank: int) -> None:
        """The steps of a phase; rank 0 prints each."""
        every = phase.get("test_every")
        for number in range(phase["steps"]):
            start, before = time.monotonic(), sent_again()
            loss = self.train(phase)
            line = {"seconds": time.monotonic() - start, "step": self.step, "loss": loss}
            line["lost"] = (sent_again() or 0) - (before or 0)
            if every and (self.step % every == 0 or number == phase["steps"] - 1):
                line["accuracy"] = self.accuracy()
            if rank == 0:
                say(line | self.told())


def say(line: dict[str, Any]) -> None:
    """One JSON line for the driver."""
    print(json.dumps(line), flush=True)


def compete(to: str, *, is_sink: bool) -> None:
    """Take what comes to this address, or send to it, until killed."""
    if is_sink:
        taken = socket.create_server((to, FLOOD_PORT)).accept()[0]
        while taken.recv(1 << 20):
            pass
    while True:
        with suppress(OSError), socket.create_connection((to, FLOOD_PORT)) as sender:
            while True:
                sender.sendall(bytes(1 << 20))


def main() -> None:
    """Phases until there is none."""
    args = json.loads(sys.argv[1])
    if "to" in args:
        compete(**args)
    torch.set_num_threads(1)
    rank = args["rank"]
    dist.init_process_group("gloo", init_method=args["master"], rank=rank, world_size=args["ranks"])
    training = None
    while True:
        told: list[Any] = [json.loads(sys.stdin.readline())] if rank == 0 else [None]
        dist.broadcast_object_list(told)
        phase = told[0]
        if not phase:
            break
        if training is None or not phase.get("keep"):
            training = None
            gc.collect()
            training = Training(phase, rank)
        training.run(phase, rank)
        dist.barrier()
        if rank == 0:
            say({"end": True})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
