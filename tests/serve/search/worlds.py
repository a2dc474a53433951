"""Search spaces with known times, for tests of searches."""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.search.autoccl import DEFAULT, Choice, SearchSpace, Tuner

CHANNELS = (1, 2, 4, 8, 16, 32)
CHUNKS = (1 << 16, 1 << 17, 1 << 18, 1 << 19)
CELLS = tuple(product((Algorithm.Tree, Algorithm.Ring), (Protocol.LL, Protocol.Simple)))
RAN = Choice(Config(Algorithm.Ring, Protocol.Simple, 8, 1 << 18))
KEY = ("AllReduce", 80)


def grid(default_runs: Choice | None = RAN) -> SearchSpace:
    """NCCL's own choice, and four subspaces of channels and chunk sizes."""
    configs = [Config(*cell, n, c) for cell, n, c in product(CELLS, CHANNELS, CHUNKS)]
    return SearchSpace([DEFAULT, *map(Choice, configs)], default_runs=default_runs)


def valleys(space: SearchSpace) -> npt.NDArray[np.float64]:
    """(A,) times, one valley a subspace; Tree/Simple/4ch/128K is 28 % below NCCL's own choice."""
    times = np.full(len(space.choices), 100.0)
    for action in space.actions:
        config = space.choices[action].config
        if action == space.default:
            continue
        assert config.num_channels is not None
        assert config.chunk_bytes is not None
        base = {CELLS[0]: 130.0, CELLS[1]: 80.0, CELLS[2]: 140.0, CELLS[3]: 95.0}
        off = abs(np.log2(config.num_channels / 4)) + abs(np.log2(config.chunk_bytes / (1 << 17)))
        times[action] = base[config.algorithm, config.protocol] * 1.08**off  # type: ignore[index]
    times[space.default] = times[space.choices.index(RAN)]
    return times


def drive(
    tuner: Tuner,
    times_us: npt.NDArray[np.float64],
    calls: int,
    noise: Callable[[int], float] = lambda _: 1.0,
) -> list[int]:
    """Run calls; returns the action of each."""
    ran = []
    for call in range(calls):
        action = tuner.ask(KEY)
        tuner.tell(KEY, float(times_us[action]) * noise(call))
        ran.append(action)
    return ran


def count_probes(
    tuner: Tuner,
    times_us: npt.NDArray[np.float64],
    calls: int,
    noise: Callable[[int], float] = lambda _: 1.0,
) -> int:
    """Run calls; returns how many ran another action than the incumbent."""
    probes = 0
    for call in range(calls):
        action = tuner.ask(KEY)
        probes += action != tuner.best(KEY)
        tuner.tell(KEY, float(times_us[action]) * noise(call))
    return probes


def scatter(sigma: float, seed: int) -> Callable[[int], float]:
    """Normal noise of the log time."""
    drawn: Sequence[float] = np.exp(np.random.default_rng(seed).normal(0.0, sigma, 5000)).tolist()
    return lambda call: drawn[call]
