"""Mutual slowdown of a collective and concurrent compute on one GPU.

Every channel is a thread block that holds a streaming multiprocessor, and the bytes that it moves
pass through the memory that the matrix product reads from. While both run:

    compute runs at   s = (1 - NC / SMs) x (1 - taken)      of its speed alone
    taken           = min(share of the memory that the call moves, what compute wants of it)
    the call lasts    c = 1 + slowdown x (busy share of the SMs)   times as long,
                      and `held` before that, at most a quarter of the compute: its blocks hold
                      their SMs until those of all ranks have found a place between the kernels

and when one ends, the other goes on alone. `held` is what the one public study of it shows (8 A100,
4 MiB beside 8 ms of compute: the iteration grows by the channels as if they were held for 2.4 ms,
and a call alone lasts 0.15 ms). So more channels shorten the call and lengthen the
compute: the config that is fastest alone need not be fastest for the iteration, the trap that Lagom
(arXiv 2602.20656) found its authors' own AutoCCL in. `c` is `Surroundings.compute`.
"""

from dataclasses import dataclass

from dynamiccl.simulator.parts import Parts, Surroundings


@dataclass(frozen=True, slots=True)
class Contention:
    """Parameters of the mutual slowdown; all shares are 0..1."""

    num_sms: int
    #: Bandwidth of the GPU's memory, and the share of it that the compute takes alone.
    memory_gbytes_per_s: float
    memory_share: float
    #: How much longer a call takes under compute that fills the GPU: 0.2 = a fifth.
    call_slowdown: float
    #: How long a call's blocks wait for their peers' beside compute, us.
    held_us: float = 0.0

    def surroundings(self, occupancy: float) -> Surroundings:
        """Slowdown of a call beside compute that fills `occupancy` of the GPU."""
        return Surroundings(compute=1.0 + self.call_slowdown * occupancy)

    def compute_speed(self, parts: Parts, size_bytes: int) -> float:
        """Speed of compute while the call runs, over its speed alone; above 0, at most 1."""
        free = 1.0 - min(parts.num_channels, self.num_sms - 1) / self.num_sms
        # A call reads and writes every byte at least once on each GPU.
        moved = 2.0 * size_bytes / (1000.0 * max(parts.quiet_us, 1e-9)) / self.memory_gbytes_per_s
        lacking = max(0.0, self.memory_share + min(moved, 1.0) - 1.0)
        return free * (1.0 - min(lacking, 0.9))
