"""The training job of bench_netsense: a model of 11.6 M parameters, its data, and every method.

The model is a residual network of fully connected layers: 46.3 MB of gradients, as many as
ResNet-18 has (NetSenseML, section 5.3: 46.2 MB), in three of DDP's buckets, and little arithmetic.
The data are drawn by scikit-learn's `make_classification`: ten classes of two clusters each, 64
features of which 24 tell something. Top-k is the usual one: 32-bit values, error feedback.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
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
RESNET18: Final = (1280, 7)
#: Width and depth of as many parameters as VGG16 has: 132 M, 528 MB.
VGG16: Final = (5750, 4)
POWERSGD_RANK: Final = 4
POWERSGD_START: Final = 2
METHODS: Final = (
    "allreduce",
    "topk-0.1",
    "topk-0.01",
    "topk-0.005",
    "fp16",
    "powersgd",
    "netsense-paper",
    "netsense",
)
#: NetSense that may not make a step longer: to be compared at the step time of top-k 0.005.
TIGHT: Final = "netsense-tight"


class Block(nn.Module):
    """x + relu(linear(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(B, width) to (B, width)."""
        found: torch.Tensor = inputs + torch.relu(self.linear(inputs))
        return found


def make_model(size: tuple[int, int], seed: int = 0) -> nn.Module:
    """A model of (width, number of blocks), the same for the same seed."""
    width, depth = size
    torch.manual_seed(seed)
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


def cap_mb(method: str) -> float:
    """DDP's default; one bucket for PowerSGD, whose chained collectives gloo mixes up."""
    return 100_000.0 if method == "powersgd" else 25.0


@dataclass
class Static:
    """A method that sends the same in each step."""

    group: dist.ProcessGroup
    wire_bytes: Callable[[DistributedDataParallel, int], float]
    ratio: float

    def figures(self, model: DistributedDataParallel, step: int) -> dict[str, float]:
        """Bytes that a rank received in a step, and the share of values."""
        return {"wire_bytes": self.wire_bytes(model, step), "ratio": self.ratio}


@dataclass
class Adaptive:
    """The hook of this project."""

    state: NetSense

    def figures(self, _model: DistributedDataParallel, _step: int) -> dict[str, float]:
        """What the hook says of the step that was just made."""
        return self.state.stats()


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


def use(method: str, model: DistributedDataParallel) -> Static | Adaptive:
    """Register the hook of a method; what tells the bytes of its steps."""
    group = model.process_group
    ranks = dist.get_world_size(group)
    sizes = [p.numel() for p in model.parameters()]

    def whole(decision: Decision) -> Callable[[DistributedDataParallel, int], float]:
        return lambda _model, _step: sum(decision.wire_bytes(n, 4, ranks) for n in sizes)

    if method.startswith("netsense"):
        mode = "paper" if method == "netsense-paper" else "model"
        slowdown = 0.0 if method == TIGHT else Settings().slowdown
        state = NetSense(model, Settings(mode=mode, slowdown=slowdown))  # type: ignore[arg-type]
        model.register_comm_hook(state, netsense_hook)
        return Adaptive(state)
    if method == "allreduce":
        return Static(group, whole(DENSE), 1.0)
    if method == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return Static(group, whole(FP16), 1.0)
    if method == "powersgd":
        state_p = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=POWERSGD_START,
        )
        model.register_comm_hook(state_p, powerSGD_hook.powerSGD_hook)
        return Static(group, _powersgd_bytes, POWERSGD_RANK)
    ratio = float(method.removeprefix("topk-"))
    topk = TopK(ratio, group)
    model.register_comm_hook(topk, topk_hook)
    return Static(group, whole(topk.decision), ratio)


def _powersgd_bytes(model: DistributedDataParallel, step: int) -> float:
    """Two factors of each matrix, vectors whole; the first steps are plain all-reduces."""
    ranks = dist.get_world_size(model.process_group)
    shapes = [p.shape for p in model.parameters()]
    if step < POWERSGD_START:
        values = sum(shape.numel() for shape in shapes)
    else:
        values = sum(
            POWERSGD_RANK * sum(shape) if len(shape) == 2 else shape.numel() for shape in shapes
        )
    return DENSE.wire_bytes(values, 4, ranks)
