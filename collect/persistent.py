"""A persistent matrix product in Triton: a program on each multiprocessor, with many tiles each.

FlashAttention, CUTLASS and Triton have such: a program whose multiprocessor a collective holds
begins when others have ended, and the product takes up to twice as long (PyTorch #143988). Triton
comes with PyTorch for CUDA, so beside.py imports this only where it is asked for.
"""

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    a, b, product, edge, side: tl.constexpr, depth: tl.constexpr
):
    wide, band = tl.cdiv(edge, side), 8
    for tile in range(tl.program_id(0), wide * wide, tl.num_programs(0)):
        # By bands: tiles of one time share what they read in the L2 cache.
        above = tile // (band * wide) * band
        high = min(band, wide - above)
        place = tile % (band * wide)
        # A matrix may have 2^32 elements.
        rows = ((above + place % high) * side + tl.arange(0, side)).to(tl.int64)[:, None]
        columns = (place // high * side + tl.arange(0, side))[None, :]
        total = tl.zeros((side, side), dtype=tl.float32)
        for first in range(0, edge, depth):
            across = (first + tl.arange(0, depth))[None, :]
            down = (first + tl.arange(0, depth)).to(tl.int64)[:, None]
            inside = (rows < edge) & (across < edge)
            left = tl.load(a + rows * edge + across, mask=inside, other=0.0)
            inside = (down < edge) & (columns < edge)
            right = tl.load(b + down * edge + columns, mask=inside, other=0.0)
            total = tl.dot(left, right, total)
        inside = (rows < edge) & (columns < edge)
        value = total.to(product.dtype.element_ty)
        tl.store(product + rows * edge + columns, value, mask=inside)


def multiply(a: Any, b: Any, product: Any, programs: int, side: int = 128) -> None:
    """Write a @ b into `product`: contiguous (E, E) tensors of one type, summed in float32."""
    _tiles[(programs,)](a, b, product, a.shape[0], side, 64, num_warps=8, num_stages=3)
