"""Size bins: quarter-octaves of NCCL's nBytes, in integers only.

A bin is the nearest quarter power of two, so that 2^k and a rounded 2^k - 16 share one. All ranks
and both languages must find the same bin: hence no floating point, but fixed-point thresholds.
"""

import math
from typing import Final

BINS_PER_OCTAVE: Final = 4
#: 2^(1/8), 2^(3/8), 2^(5/8), 2^(7/8) in 1.32 fixed point, rounded up.
EDGES_Q32: Final = (4_683_695_048, 5_569_883_476, 6_623_745_059, 7_877_004_752)
#: Larger sizes have no bin, so that shifts stay inside 64 bits.
MAX_SIZE_BITS: Final = 62


def size_bin(size_bytes: int) -> int:
    """The bin of a message; -1 for 0 and for absurd sizes.

    >>> [size_bin(n) for n in (1, 2, 3, 4, 1 << 20, (1 << 20) - 16)]
    [0, 4, 6, 8, 80, 80]
    """
    if size_bytes <= 0 or size_bytes >= 1 << MAX_SIZE_BITS:
        return -1
    octave = size_bytes.bit_length() - 1
    mantissa = size_bytes << (32 - octave) if octave <= 32 else size_bytes >> (octave - 32)
    return BINS_PER_OCTAVE * octave + sum(mantissa >= edge for edge in EDGES_Q32)


def bin_center_bytes(index: int) -> int:
    """The size that stands for a bin: its quarter power of two, rounded.

    >>> bin_center_bytes(80), bin_center_bytes(6)
    (1048576, 3)
    """
    return round(math.exp2(index / BINS_PER_OCTAVE))


def bin_first_byte(index: int) -> int:
    """The smallest size whose bin is `index` or above.

    >>> bin_first_byte(80), size_bin(bin_first_byte(80)), size_bin(bin_first_byte(80) - 1)
    (961549, 80, 79)
    """
    octave, quarter = divmod(index, BINS_PER_OCTAVE)
    # The edge below quarter 0 is the last of the octave before.
    edge = EDGES_Q32[quarter - 1] if quarter else EDGES_Q32[-1]
    shift = 32 - (octave if quarter else octave - 1)
    return -(-edge >> shift) if shift >= 0 else edge << -shift


def size_label(size_bytes: int) -> str:
    """A byte count with a binary unit.

    >>> size_label(1 << 20), size_label(1472)
    ('1M', '1.44K')
    """
    for exponent, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << exponent:
            amount = size_bytes / (1 << exponent)
            return f"{amount:.{4 if amount >= 999.5 else 3}g}{unit}"
    return str(size_bytes)
