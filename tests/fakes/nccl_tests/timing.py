"""Noisy times, reproducible by seed, launch, cycle, size and half."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamiccl.simulator.noise import Noise
from tests.fakes.nccl_tests.rows import Iterations, slowest

#: Spread of single iterations around their mean; made up.
_SPREAD = 0.03
#: What waiting for each call adds (`-z`), and what a launch costs the processor (`-C`); made up.
BLOCKING_US = 6.0
LAUNCH_US = 4.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a draw is for: cycle of `-N`, size, half, and the key of the config."""

    cycle: int
    size_bytes: int
    in_place: bool
    key: str


class Clock:
    """The draws of one launch."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read FAKE_SEED, FAKE_LAUNCH and FAKE_NOISE."""
        sigma = float(environment.get("FAKE_NOISE", "0.015"))
        seed = int(environment.get("FAKE_SEED", "0"))
        loud = sigma > 0
        self._noise = Noise(seed, sigma, 0.02 if loud else 0.0, 0.005 if loud else 0.0)
        self._launch = environment.get("FAKE_LAUNCH", f"{os.getpid()}-{time.time_ns()}")

    def measured_us(self, quiet_us: float, place: Place) -> float:
        """A time as this launch measures it."""
        return quiet_us * self._noise.factor(f"{self._launch}|{place.cycle}", str(place))

    def iterations(
        self, mean_us: float, place: Place, count: int, slow: Sequence[float], skipped: int
    ) -> Iterations:
        """Single times around a mean, for every process; `slow` has each one's factor."""
        digest = hashlib.sha256(f"{self._noise.seed}|{self._launch}|{place}".encode()).digest()
        generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        spread = _SPREAD if self._noise.sigma > 0 else 0.0
        factors = np.exp(generator.normal(0.0, spread, size=(len(slow), count)))
        each = np.array(slow)[:, None] / np.mean(slow)
        # Timers of CUDA events count half microseconds; nccl-tests keeps them as float32.
        times = (mean_us * each * factors / factors.max(axis=0).mean()).astype(np.float32).tolist()
        rows = tuple(tuple(row) for row in times)
        return Iterations(slowest(rows), skipped, rows)
