"""What a gradient exchange puts on the wire: methods, decisions, and their bytes.

Bytes are what one rank receives, which in a ring is also what it sends: 2(N-1)/N of the payload
for an all-reduce of N ranks, N-1 payloads for an all-gather.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: A position in a bucket, as an all-gather carries it.
INDEX_BYTES: Final = 4
HALF_BYTES: Final = 2
SINGLE_BYTES: Final = 4


class Method(StrEnum):
    """How a step's gradients are exchanged."""

    DENSE = "dense"
    FP16 = "fp16"
    SPARSE = "sparse"


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do in a step: how, the share of values sent, and whether in 16 bits."""

    method: Method
    ratio: float
    quantised: bool = False

    def count(self, numel: int) -> int:
        """How many of a bucket's `numel` values a rank sends when sparse: 1 at least."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    @property
    def value_bytes(self) -> int:
        """Of a value that is sent sparse."""
        return HALF_BYTES if self.quantised else SINGLE_BYTES

    def payload_bytes(self, numel: int) -> int:
        """Of a bucket as a rank sends it sparse: positions and values, in whole words."""
        return -(-self.count(numel) * (INDEX_BYTES + self.value_bytes) // INDEX_BYTES) * INDEX_BYTES

    def wire_bytes(self, numel: int, element_bytes: int, ranks: int) -> float:
        """Of a bucket of `numel` values, each of `element_bytes` in the gradient's own type."""
        if self.method is Method.SPARSE:
            return float((ranks - 1) * self.payload_bytes(numel))
        each = min(HALF_BYTES, element_bytes) if self.method is Method.FP16 else element_bytes
        return 2.0 * (ranks - 1) / ranks * numel * each


DENSE: Final = Decision(Method.DENSE, 1.0)
FP16: Final = Decision(Method.FP16, 1.0, quantised=True)
