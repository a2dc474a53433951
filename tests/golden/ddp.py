"""The DDP hook's decisions over a recorded network, by both laws, and what its compression sends.

The network is drawn by `random`, and tensors are whole numbers by a power of two, so that they are
the same bits on every machine. A transfer takes as long as what the law decided to send.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch

from dynamiccl.serve.ddp import Settings
from dynamiccl.serve.ddp.compression import Pruning, add_up, compress
from dynamiccl.serve.ddp.law import Gradient, Interval
from dynamiccl.serve.ddp.laws import make_law
from dynamiccl.serve.ddp.wire import Decision, Method
from tests.golden.golden import Golden

#: The gradients of ResNet-18, 46.2 MB, between four ranks.
RESNET18: Final = Gradient(numel=11_550_000, num_bytes=46_200_000, ranks=4)
STEPS: Final = 240
SETTINGS: Final = {
    "model": Settings(),
    "model, eager": Settings(slowdown=0.05, dead_band=0.0, switch_gain=0.0, tr_q=0.5),
    "paper": Settings(mode="paper"),
    "paper, fast": Settings(mode="paper", start_ratio=0.3, beta1=0.2, beta2=0.05, alpha=0.8),
}


@dataclass(frozen=True, slots=True)
class Step:
    """The network and the compute beside it in one step."""

    bytes_per_s: float
    latency_s: float
    #: Of the transfer's own time, for packets that were sent again.
    lost: float
    compute_s: float
    is_measured: bool
    norm: float | None


def recorded() -> list[Step]:
    """Four bandwidths in turn, each with jitter, losses, and steps of which nothing is known."""
    random, steps = Random(43), []
    for number in range(STEPS):
        mbit_per_s = (200, 2000, 25_000, 500)[4 * number // STEPS]
        steps.append(
            Step(
                bytes_per_s=mbit_per_s * 125e3 * (0.9 + 0.2 * random.random()),
                latency_s=1e-3 * (1.0 + random.random()),
                lost=random.choice([0.0] * 9 + [3.0]),
                compute_s=0.2 * (0.95 + 0.1 * random.random()),
                is_measured=random.random() > 0.05,
                norm=random.choice([None, 0.001, 1.0, 1.0, 5.0]),
            )
        )
    return steps


def make_decisions(_directory: Path) -> Any:
    """Method, share of values and bits of each step, and what the law knows in the end."""
    found = {}
    for name, settings in SETTINGS.items():
        law, decided = make_law(settings, RESNET18), []
        for step in recorded():
            decision = law.decision
            decided.append([decision.method.value, decision.ratio, decision.quantised])
            wire_bytes = RESNET18.wire_bytes(decision)
            transfer_s = step.latency_s + wire_bytes / step.bytes_per_s * (1.0 + step.lost)
            law.update(
                Interval(
                    method=decision.method,
                    wire_bytes=wire_bytes,
                    transfer_s=transfer_s if step.is_measured else None,
                    latency_s=step.latency_s,
                    compute_s=step.compute_s,
                    overlap_s=0.1 * step.compute_s,
                    codec_s=0.05 if decision.method is Method.SPARSE else 0.01,
                    norm=step.norm,
                )
            )
        found[name] = {"decisions": decided, "facts": law.facts()}
    return found


#: A prime: the products below run through all its remainders, so that no two values are equal. It
#: is more than the sample that looks for the largest ones.
_NUMEL: Final = 100_003


def numbers(factor: int) -> torch.Tensor:
    """Each of +-1/1024, 2/1024, ..., once."""
    place = torch.arange(_NUMEL, dtype=torch.int64)
    magnitude = (place * factor) % _NUMEL + 1
    return (magnitude * (1 - 2 * (magnitude % 2))).float() / 1024


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def make_sent(_directory: Path) -> Any:
    """Digests of the bytes that three ranks send in three steps, of what they owe, and the mean."""
    found = {}
    weights = [numbers(31)[:-3].reshape(1000, -1), torch.zeros(3)]
    for quantised in (False, True):
        for scale, keeps in ((0.0, False), (0.5, False), (0.5, True)):
            decision = Decision(Method.SPARSE, 0.03, quantised)
            kept = Pruning(scale).kept(weights, decision, 0)
            owed = [torch.zeros(_NUMEL) for _ in range(3)]
            lines = []
            for turn in range(3):
                sent = [
                    compress(
                        numbers(7919 + 2 * rank + 10 * turn),
                        residual,
                        decision,
                        kept=kept,
                        prune_to_residual=keeps,
                        turn=turn,
                    )
                    for rank, residual in enumerate(owed)
                ]
                mean = torch.empty(_NUMEL)
                add_up(torch.cat(sent), decision, 3, mean)
                lines.append([digest(torch.cat(sent)), digest(torch.cat(owed)), digest(mean)])
            case = f"{16 if quantised else 32} bits, pruning {scale}, to residual {keeps}"
            found[case] = {"bytes": sent[0].numel(), "sent, owed, mean": lines}
    return found


GOLDENS: Final = (
    Golden("ddp-decisions", make_decisions),
    Golden("ddp-sent", make_sent),
)
