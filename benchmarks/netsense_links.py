"""Links on paper: what a law of the hook does where a transfer takes exactly L + bytes/B.

    python benchmarks/netsense_links.py

shows mode paper from 200 to 2,000 Mbit/s: RTT is then the transfer's own time, so the least RTT
belongs to the smallest transfer, and the BDP is hardly above what that one sent. The law halves the
ratio nearly whenever it looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dynamiccl.serve.ddp.laws import Decision, Gradient, Interval, Law, Method, Settings, make_law

#: The gradients of ResNet-18 as the paper counts them, 46.2 MB, between four ranks.
RESNET18: Final = Gradient(numel=11_550_000, num_bytes=46_200_000, ranks=4)
RATES_MBIT: Final = (200, 500, 800, 1000, 2000)


@dataclass(frozen=True)
class Link:
    """A network between ranks and the compute of a step beside it."""

    mbit_per_s: float
    latency_s: float = 1e-3
    compute_s: float = 0.2
    overlap_s: float = 0.02
    codec_s: float = 0.05

    def transfer_s(self, wire_bytes: float) -> float:
        """L + bytes/B."""
        return self.latency_s + wire_bytes / (self.mbit_per_s * 125e3)


def follow(law: Law, links: Sequence[Link], gradient: Gradient = RESNET18) -> list[Decision]:
    """The decision of each step over a link each; decided one step late, as the hook does."""
    decisions, waiting = [], None
    for link in links:
        if waiting is not None:
            law.update(waiting)
        decision = law.decision
        decisions.append(decision)
        wire_bytes = gradient.wire_bytes(decision)
        waiting = Interval(
            decision=decision,
            wire_bytes=wire_bytes,
            transfer_s=link.transfer_s(wire_bytes),
            latency_s=link.latency_s,
            compute_s=link.compute_s,
            overlap_s=link.overlap_s,
            codec_s=link.codec_s if decision.method is Method.SPARSE else 0.01,
            norm=1.0,
        )
    return decisions


def paper_ratio(mbit_per_s: float, *, steps: int = 400, **settings: float) -> float:
    """Mean of the ratio over the second half of a run in mode paper, before 16 bits double it."""
    law = make_law(Settings(mode="paper", tr_q=0.0, **settings), RESNET18)  # type: ignore[arg-type]
    decisions = follow(law, [Link(mbit_per_s)] * steps)
    late = decisions[steps // 2 :]
    return sum(decision.ratio for decision in late) / len(late)


def model_ratio(mbit_per_s: float, *, steps: int = 40) -> Decision:
    """What mode model settles on."""
    return follow(make_law(Settings(), RESNET18), [Link(mbit_per_s)] * steps)[-1]


def main() -> None:
    """Print both modes, one line a rate."""
    for rate in RATES_MBIT:
        model = model_ratio(rate)
        paper = paper_ratio(rate)
        print(f"{rate:5} Mbit/s  paper {paper:.4f}  model {model.method} {model.ratio:.4f}")


if __name__ == "__main__":
    main()
