"""Variants of online recipes, for online_ablations.py."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from bench_online import STEPS
from torch import nn

from dynamiccl.train.encoders import WINDOW_ENCODERS, FlatWindow, register_window_encoder

BASE: Final = "a3c-lstm"
ONLINE: Final = "impala-lstm"
_LONG: Final = f"steps={STEPS}"
#: By name: recipe, and what is set.
VARIANTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        BASE: (BASE, ()),
        "no probes": (BASE, ("probe_every=0",)),
        "no state of the job, no probes": ("a3c", ("probe_every=0",)),
        "no window": (BASE, ("window_encoder=last-0",)),
        "the last call": (BASE, ("window_encoder=last-1",)),
        "the last 2 calls": (BASE, ("window_encoder=last-2",)),
        "the last 4 calls": (BASE, ("window_encoder=last-4",)),
        "1-D convolution over the window": (BASE, ("window_encoder=cnn",)),
        "LSTM over the window": (BASE, ("window_encoder=lstm",)),
        "critic sees one decision": (BASE, ("seen_decisions=1",)),
        "a statistic of RMSProp each": (BASE, ("shared_statistic=false",)),
    }
)
#: As `VARIANTS`, with the updates of bench_online.py.
FINALISTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        ONLINE: (ONLINE, (_LONG,)),
        "impala-lstm, 1-D convolution": (ONLINE, (_LONG, "window_encoder=cnn")),
    }
)


class LastCalls(nn.Module):
    """The last `calls` calls of the window as they are; the older ones are not seen."""

    def __init__(self, calls: int, window_shape: Sequence[int]) -> None:
        """Nothing to learn."""
        super().__init__()
        self.flat = FlatWindow((calls, window_shape[1]))
        self.first = int(window_shape[0]) - calls
        self.width = self.flat.width

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """(B, K, W) -> (B, calls x W)."""
        return self.flat(window[:, self.first :])  # type: ignore[no-any-return]


def register_last_calls() -> None:
    """Make `last-0` to `last-4` window encoders."""
    for calls in (0, 1, 2, 4):
        if f"last-{calls}" not in WINDOW_ENCODERS:
            register_window_encoder(f"last-{calls}", partial(LastCalls, calls))
