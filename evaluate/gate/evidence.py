"""Fresh runs, config against NCCL's default, paired by run: what a verdict rests on."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import stats

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import NOISE_KEY, comparable, independent, noise_bands, quiet, tuned
from dynamiccl.datasets.manifest import Support
from dynamiccl.datasets.splits import with_split
from dynamiccl.nccl import NcclVersion

#: Independent runs of each arm that a test needs.
MIN_RUNS: Final = 5
#: What a run must have in common for its two times to be a pair.
_PAIR: Final = ("sweep", "run", "size_bytes", "datatype", "in_place")
_RUN: Final = ("sweep", "run")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One config against NCCL's default in one size bin."""

    runs: int
    #: Median over runs of default / config - 1; None without a run.
    gain: float | None
    #: That the gain does not exceed the noise band, if it did not; None when it cannot be tested.
    p_value: float | None
    #: Why it cannot be tested; empty when it was.
    reason: str


class FreshRuns:
    """Quiet, independent rows of a data set, by support, collective, size bin and action."""

    def __init__(
        self, frame: pl.DataFrame, catalogue: Catalogue, *, known: pl.DataFrame | None = None
    ) -> None:
        """Take the rows that may stand in a verdict; of `known`, what NCCL's own choice was."""
        self._rows = _rows(frame, catalogue)
        self._known = [self._rows, *([] if known is None else [_rows(known, catalogue)])]
        bands = noise_bands(quiet(tuned(frame)), NOISE_KEY).select(*NOISE_KEY, "noise_band")
        self._bands = {(system, collective): band for system, collective, band in bands.iter_rows()}

    def test(self, support: Support, collective: str, size_bin: int, action: int) -> Evidence:
        """Whether a config's gain in a size bin exceeds the noise band, by a one-sided t-test.

        On the logarithms of the paired ratios, one a run: what a run does to all its times alike
        cancels.
        """
        rows = _of(self._rows, support).filter(collective=collective, bin=size_bin)
        gains = _paired_gains(rows, action)
        gain = float(np.expm1(np.median(gains))) if len(gains) else None
        if len(gains) < MIN_RUNS:
            reason = f"{len(gains)} fresh runs of both, not {MIN_RUNS}"
            return Evidence(len(gains), gain, None, reason)
        band = self._bands.get((support.system, collective))
        if band is None:
            return Evidence(len(gains), gain, None, "the noise band is not known")
        return Evidence(len(gains), gain, _p_value(gains - np.log1p(band)), "")

    def measured_bins(self, support: Support, collective: str) -> list[int]:
        """The size bins in which NCCL's default was measured, ascending."""
        rows = _of(self._rows, support).filter(collective=collective, action=ABSTAIN_ACTION)
        return [int(each) for each in rows["bin"].unique().sort()]

    def default_choice(self, support: Support, collective: str, size_bin: int) -> object:
        """What NCCL's default was there, (algorithm, protocol); None unless it was always one."""
        asked = {"collective": collective, "bin": size_bin, "action": ABSTAIN_ACTION}
        chosen = {
            row
            for rows in self._known
            for row in _of(rows, support)
            .filter(**asked)
            .select("actual_algorithm", "actual_protocol")
            .unique()
            .iter_rows()
        }
        (choice,) = chosen if len(chosen) == 1 else ((None, None),)
        return None if None in choice else choice


def _rows(frame: pl.DataFrame, catalogue: Catalogue) -> pl.DataFrame:
    """Rows that may stand in a verdict, with `bin` and `action`."""
    rows = with_split(independent(comparable(quiet(tuned(frame)))))
    return rows.with_columns(catalogue.actions(rows)).drop_nulls("action")


def _of(rows: pl.DataFrame, support: Support) -> pl.DataFrame:
    """Those of one system, shape, launch profile and NCCL minor version."""
    same = rows.filter(
        system=support.system,
        num_nodes=support.num_nodes,
        ranks_per_node=support.ranks_per_node,
        launch_profile=support.launch_profile,
    )
    wanted = _minor(support.nccl_version)
    if wanted is None:
        return same.filter(pl.col("nccl_version").is_null())
    texts = same["nccl_version"].drop_nulls().unique().to_list()
    return same.filter(pl.col("nccl_version").is_in([t for t in texts if _minor(t) == wanted]))


def passing(p_values: npt.NDArray[np.float64], q: float) -> npt.NDArray[np.bool_]:
    """Which hypotheses fall at a false discovery rate of `q` (Benjamini and Hochberg 1995)."""
    order = np.argsort(p_values)
    limits = q * (np.arange(len(p_values)) + 1) / max(len(p_values), 1)
    below = np.flatnonzero(p_values[order] <= limits)
    passed = np.zeros(len(p_values), dtype=np.bool_)
    if len(below):
        passed[order[: below[-1] + 1]] = True
    return passed


def _paired_gains(rows: pl.DataFrame, action: int) -> npt.NDArray[np.float64]:
    """log(default / config) of each run that measured both, the mean over its sizes."""

    def arm(which: int, name: str) -> pl.DataFrame:
        times = pl.col("time_us").log().median().alias(name)
        return rows.filter(action=which).group_by(_PAIR).agg(times)

    pairs = arm(ABSTAIN_ACTION, "default").join(
        arm(action, "config"), on=_PAIR, how="inner", nulls_equal=True
    )
    runs = pairs.group_by(_RUN).agg(gain=(pl.col("default") - pl.col("config")).mean())
    return runs.sort(_RUN)["gain"].to_numpy().astype(np.float64)


def _p_value(excess: npt.NDArray[np.float64]) -> float:
    if np.ptp(excess) == 0.0:  # no spread: the t statistic would be infinite
        return 0.0 if excess[0] > 0.0 else 1.0
    return float(stats.ttest_1samp(excess, 0.0, alternative="greater").pvalue)


def _minor(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    version = NcclVersion.parse(text)
    return version.major, version.minor
