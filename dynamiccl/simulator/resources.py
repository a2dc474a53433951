"""AutoCCL's resource knobs besides channels: threads and chunk size.

Both are 1 at NCCL's own value, so that what was fitted to measurements of NCCL's own stays as it
is. Their shapes are literature's (AutoCCL, NSDI 2025, section 3: bandwidth rises with threads and
with chunk, saturates and falls), and their numbers are priors: no public sweep varies them alone.

    g(NT) = f(NT / best) / f(default / best)     f(x) = min(x (1 + h) / (h + x), 1) /
                                                        (1 + c max(0, x - 1))
    h(C)  = q(C / best) / q(default / best)      q(r) = 1 + min(curvature log2(r)^2, largest)
"""

import math

from dynamiccl.simulator.parameters import ChunkParameters, ThreadParameters

#: Threads that `NCCL_NTHREADS` may ask for, in steps of a warp.
MIN_THREADS, MAX_THREADS, WARP = 64, 512, 32
_SMALLEST_BEST_BYTES = 64 << 10


def thread_factor(threads: ThreadParameters, num_threads: int | None) -> float:
    """Bandwidth of a channel with `num_threads` / with NCCL's own number."""
    if num_threads is None:
        return 1.0
    asked = min(max(num_threads // WARP * WARP, MIN_THREADS), MAX_THREADS)
    return _rise(asked, threads) / _rise(threads.default, threads)


def _rise(num_threads: int, threads: ThreadParameters) -> float:
    x, half = num_threads / threads.best.value, threads.half.value
    rise = x * (1.0 + half) / (half + x)
    return min(rise, 1.0) / (1.0 + threads.crowding.value * max(0.0, x - 1.0))


def chunk_factor(
    chunks: ChunkParameters, rank_bytes: float, default_bytes: int, used_bytes: int
) -> float:
    """Time with a chunk of `used_bytes` / with NCCL's own of `default_bytes`."""
    if used_bytes == default_bytes:
        return 1.0
    best = min(max(rank_bytes / chunks.pieces.value, _SMALLEST_BEST_BYTES), default_bytes)
    return _parabola(used_bytes / best, chunks) / _parabola(default_bytes / best, chunks)


def _parabola(ratio: float, chunks: ChunkParameters) -> float:
    return 1.0 + min(chunks.curvature.value * math.log2(ratio) ** 2, chunks.largest.value)
