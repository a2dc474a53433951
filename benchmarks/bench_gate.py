"""What the gate lets through in three fresh runs, against known truth.

    python benchmarks/bench_gate.py    # a few minutes; FULL=1: five times the gates

*Small sweeps*: one collective and shape of a machine drawn at random, 18 sizes, 30 configs, three
repeats. The policy wants the fastest config of the sweep; three fresh runs of one repeat judge it.
`small_sweep_gate_kept`: of the true gain (ln) in bins where it exceeds the noise band and four
standard deviations of one run's, what passed; `_least` is that of the worst machine.

*Drawn gates*: 18 bins, three runs, and noise that the gate does not suppose (`_drawn`).
`gate_false_passes`: of the bins that passed, those whose true gain is not above 0, and the upper
end of its 95 % interval (Clopper and Pearson).
"""

import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from harness import FULL, parallel, simulated, write_result
from judge_worlds import perturbed
from learning_sweeps import NO_NOISE
from scipy import stats

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import noise_bands, task_grid, tuned
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.questions import table_bins
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.evidence import FreshRuns, Verdict
from dynamiccl.evaluate.gate import DEFAULT_Q, pass_gate
from dynamiccl.sizes import size_bin
from tests.policies import hand_made_manifest
from tests.rows import default, forced
from tests.rows import frame as rows_frame

RUNS: Final = 3
#: Drawn gates that one process judges at a time.
_PART: Final = 50
SIZES: Final = [1 << power for power in range(13, 31)]
_ONE_NODE: Final = "[{ num_nodes = 1, ranks_per_node = 8 }]"
#: Systems whose physics are drawn anew, and a shape of each.
MACHINES: Final = (
    ("b300-nvlink", _ONE_NODE),
    ("a100-nvswitch", _ONE_NODE),
    ("gb10-roce", "[{ num_nodes = 4, ranks_per_node = 1 }]"),
)
SWEEP: Final = {
    "collectives": '["AllReduce"]',
    "algorithms": '["Ring", "Tree"]\nnum_channels = [1, 2, 4, 8, 16]',
    "sizes": '{ min = "8K", max = "1G" }',
}
Times = npt.NDArray[np.float64]
#: (action, predicted gain) by size bin.
Wanted = dict[int, tuple[int, float]]


def gate_figures() -> dict[str, float]:
    """All parts."""
    many = 5 if FULL else 1
    return small_sweeps(20 * many) | drawn_gates(1000 * many)


class WantedConfigs:
    """A policy of one shape that wants one config in each of some size bins of AllReduce."""

    def __init__(self, frame: pl.DataFrame, wanted: Wanted) -> None:
        """`frame` is what it was made from."""
        made = hand_made_manifest(frame, noise_bands(tuned(frame)))
        self._wanted = [
            wanted.get(each, (0, 0.0)) if collective.wire == "AllReduce" else (0, 0.0)
            for collective in TUNED
            for each in table_bins(made.supports[0])
        ]
        self.manifest = replace(made, abstain_margin=0.0)

    def act(self, _: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) the wanted actions, where they are allowed."""
        actions = np.array([action for action, _ in self._wanted])
        return np.where(mask[np.arange(len(actions)), actions], actions, 0)

    def least_gains(self, _: Observations) -> None:
        """It says no spreads."""

    def values(self, _: Observations, mask: npt.NDArray[np.bool_]) -> Times:
        """(N, A) -1 for NCCL's own choice, and of the wanted actions what is predicted."""
        values = np.full(mask.shape, -1.0)
        for row, (action, gain) in enumerate(self._wanted):
            values[row, action] = -1.0 / (1.0 + gain)
        return values

    def passes(self, fresh: pl.DataFrame) -> set[int]:
        """The bins that pass a gate at the default rate."""
        gated = pass_gate(self, fresh)  # type: ignore[arg-type]
        return {cell.bin for cell in gated.cells if cell.verdict is Verdict.PASSED}


def small_sweeps(machines: int) -> dict[str, float]:
    """The share of the gain that passes on small sweeps of machines drawn at random."""
    with tempfile.TemporaryDirectory() as folder:
        found = [_small_sweep(number, Path(folder) / str(number)) for number in range(machines)]
    kept, possible, bins, slower = np.array(found).T
    return {
        "small_sweep_gate_kept": float(kept.sum() / possible.sum()),
        "small_sweep_gate_kept_least": float(np.min(kept[possible > 0] / possible[possible > 0])),
        "small_sweep_gate_bins": int(bins.sum()),
        "small_sweep_gate_slower": int(slower.sum()),
    }


def _small_sweep(number: int, out: Path) -> tuple[float, float, int, int]:
    """The gain (ln) that passed and that is clear, clear bins, and those that passed and lose."""
    name, shape = MACHINES[number % len(MACHINES)]
    system = perturbed(name, number)

    def measured(sweep: str, cycles: int, seed: int, noise: str = "") -> pl.DataFrame:
        about = {"name": f'"{sweep}"', "system": f'"{system.name}"', "noise": noise}
        about |= {"groups": shape, "nccl_version": f'"{system.nccl_version}"'}
        return tuned(read(simulated(out / sweep, seed, cycles, SWEEP | about, system)))

    trained = measured("trained", RUNS, 2 * number)
    fresh = measured("fresh", RUNS, 2 * number + 1)
    catalogue = Catalogue.from_frame(trained)
    seen = task_grid(trained, catalogue, list(Split))
    truth = task_grid(measured("truth", 1, 0, NO_NOISE), catalogue, list(Split))
    best, bins = np.nanargmin(seen.times_us, axis=1), seen.tasks["bin"].to_list()
    predicted = seen.default_us / seen.chosen_us(best) - 1.0
    wanted = {b: (int(a), float(g)) for b, a, g in zip(bins, best, predicted, strict=True) if a}
    gains = np.log(truth.default_us / truth.chosen_us(best))
    policy = WantedConfigs(trained, wanted)
    let = policy.passes(fresh)
    # One standard deviation for all bins of a machine: three runs do not tell that of each.
    runs, [support] = FreshRuns(fresh, catalogue), policy.manifest.supports
    by_run = [runs.gains(support, "AllReduce", [b], a) for b, (a, _) in wanted.items()]
    spread = np.sqrt(np.mean([np.var(each, ddof=1) for each in by_run]))
    is_clear = gains > np.log1p(runs.band(support, "AllReduce") or np.inf) + 4.0 * spread
    is_let = np.array([each in let for each in bins])
    kept = float(gains[is_clear & is_let].sum())
    slower = int((gains[is_let] <= 0.0).sum())
    return kept, float(gains[is_clear].sum()), int(is_clear.sum()), slower


def drawn_gates(gates: int) -> dict[str, float]:
    """Bins that pass, and those of them without a gain, over gates with noise of all kinds."""
    parts = [(range(first, first + _PART),) for first in range(0, gates, _PART)]
    counts = np.concatenate([counts for _, counts in parallel(judge_drawn, parts)])
    num_passed, num_false = map(int, counts.sum(axis=0))
    return {
        "gate_gates": gates,
        "gate_q": DEFAULT_Q,
        "gate_passed": num_passed,
        "gate_false_passes": num_false / num_passed,
        "gate_false_passes_hi": float(stats.beta.ppf(0.975, num_false + 1, num_passed - num_false)),
    }


def judge_drawn(seeds: range) -> npt.NDArray[np.int64]:
    """(gates, 2) bins that pass, and those of them whose true gain is not above 0."""
    trained = _frame("trained", 1)
    fresh = {repeats: _frame("fresh", repeats) for repeats in (1, 4)}
    counts = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        gains, logs = _drawn(random, int(random.choice(list(fresh))))
        # The policy believes in all bins; in some there is nothing, or less than that.
        predicted = np.maximum(gains, 0.0) + random.exponential(0.05, len(SIZES))
        wanted = {size_bin(s): (1, float(g)) for s, g in zip(SIZES, predicted, strict=True)}
        times = pl.Series("time_us", 100.0 * np.exp(logs.ravel()))
        let = WantedConfigs(trained, wanted).passes(fresh[logs.shape[-1]].with_columns(times))
        false = sum(size_bin(s) in let for s, g in zip(SIZES, gains, strict=True) if g <= 0.0)
        counts.append((len(let), false))
    return np.array(counts)


def _drawn(random: np.random.Generator, repeats: int) -> tuple[Times, Times]:
    """(S,) true gains (ln) of the sizes, and (2, S, R, repeats) log times of default and config."""
    num, shape = len(SIZES), (2, len(SIZES), RUNS, repeats)
    gains = np.where(
        random.random(num) < 0.5,
        random.exponential(0.5, num),
        -random.exponential(0.02, num) * (random.random(num) < 0.5),
    )
    sigma = np.exp(random.normal(np.log(0.01), 0.5))
    own = np.exp(random.normal(0.0, random.uniform(0.0, 1.2), num))
    own *= np.where(random.random(num) < random.choice([0.0, 0.05, 0.2]), 8.0, 1.0)
    logs = sigma * own[:, None, None] * random.normal(size=shape)
    # What all sizes of one process share, and what neighbours of it do.
    process = (2, 1, RUNS, 1)
    logs += sigma * random.uniform(0.0, 2.0) * random.normal(size=process)
    is_slow = random.random(process) < random.choice([0.0, 0.05, 0.15])
    logs += is_slow * np.log(random.uniform(1.1, 2.0, process))
    apart = np.subtract.outer(np.arange(num), np.arange(num))
    alike = np.linalg.cholesky(np.exp(-((apart / 3.0) ** 2) / 2.0) + 1e-9 * np.eye(num))
    smooth = np.einsum("st,atr->asr", alike, random.normal(size=shape[:3]))
    logs += sigma * random.uniform(0.0, 1.0) * smooth[..., None]
    is_spike = random.random(shape) < random.choice([0.0, 0.01, 0.03, 0.1])
    logs += is_spike * np.log(random.uniform(1.3, 8.0, shape))
    # A run that is slow as a whole: what is paired cancels it.
    logs += random.normal(0.0, 0.2, (1, 1, RUNS, 1))
    logs[1] -= gains[:, None, None]
    return gains, logs


def _frame(sweep: str, repeats: int) -> pl.DataFrame:
    """Rows of NCCL's default and Ring/LL, by size, run and repeat, without their times."""
    rows = []
    for arm, size, run, repeat in product(range(2), SIZES, range(RUNS), range(repeats)):
        place: dict[str, Any] = {"sweep": sweep, "run": f"{sweep}-{run}", "repeat": repeat}
        place |= {"size_bytes": size, "actual_num_channels": 4 if arm else 16}
        rows.append(forced("Ring", "LL", **place) if arm else default(**place))
    return rows_frame(*rows)


if __name__ == "__main__":
    write_result("gate", gate_figures())
