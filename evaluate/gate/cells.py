"""A gate's verdict on one size bin."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The gate's verdict on a size bin."""

    ABSTAINS = "abstains"
    PASSED = "passed"
    INFERRED = "inferred"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cell:
    """One size bin of one collective and group shape, and its verdict."""

    system: str
    num_nodes: int
    num_ranks: int
    collective: str
    bin: int
    #: The policy's action there, and its name.
    action: int
    config: str
    verdict: Verdict
    reason: str
    runs: int
    gain: float | None
    p_value: float | None
    #: 95 % interval of the mean gain; None where too few runs measured it.
    low: float | None = None
    high: float | None = None
    #: The gain that the policy itself predicts; None where it abstains.
    predicted: float | None = None
    #: Channels of the config and of NCCL's own choice, as read back in the policy's data, and where
    #: the test is about them in the fresh runs; None: not read back.
    channels: int | None = None
    own_channels: int | None = None
    #: Loss that it must stay below where it takes fewer channels; None: it must gain.
    slack: float | None = None

    @property
    def loss(self) -> float | None:
        """The loss that it is tested to stay below; None: it must gain."""
        used, own = self.channels, self.own_channels
        return self.slack if used is not None and own is not None and used < own else None

    @property
    def place(self) -> tuple[str, int, int, str, int]:
        """System, nodes, ranks, collective and size bin: one cell of a policy has each."""
        return self.system, self.num_nodes, self.num_ranks, self.collective, self.bin
