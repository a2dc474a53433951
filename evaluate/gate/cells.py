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

    @property
    def place(self) -> tuple[str, int, int, str, int]:
        """System, nodes, ranks, collective and size bin: one cell of a policy has each."""
        return self.system, self.num_nodes, self.num_ranks, self.collective, self.bin
