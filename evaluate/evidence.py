"""Evidence for the gate: fresh runs of a config against NCCL's default, paired by run.

Three runs tell little of a bin's variance: it is shrunk towards that of all tested bins, as in
Smyth's moderated t (2004; limma's eBayes).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from scipy import optimize, special, stats

from dynamiccl.datasets import cells
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.costs import COST_KEY, log_costs, read_costs
from dynamiccl.datasets.manifest import SHAPE_COLUMNS, Support
from dynamiccl.datasets.questions import cold_tasks
from dynamiccl.datasets.splits import with_bins, with_split
from dynamiccl.drawn_worlds import CELLS
from dynamiccl.nccl import Collective
from dynamiccl.sizes import bin_center_bytes, size_label

#: Independent runs of each config that a test needs.
MIN_RUNS: Final = 3
#: Most degrees of freedom that all bins may add to a bin's own, and share of the other bins' that
#: they may add: with more, simulated gates break their false discovery rate.
_MOST_PRIOR: Final = 2.0
_PRIOR_SHARE: Final = 0.25
#: Variance of log times that no clock tells from none.
_LEAST_VARIANCE: Final = 1e-12
#: `import` numbers the processes of a log behind its hash; what is in one log ran together.
_PROCESS: Final = r"(-[0-9a-f]{8})\.\d+$"
#: Equal in both times of a pair.
_PAIR: Final = ("sweep", "job", "size_bytes", "datatype", "in_place")
_RUN: Final = ("sweep", "job")
_WHERE: Final = (*SHAPE_COLUMNS, "collective", "bin")
Place = tuple[str, int, int]
"""System, nodes and ranks."""


class Verdict(StrEnum):
    """The gate's verdict on a size bin."""

    ABSTAINS = "abstains"
    PASSED = "passed"
    INFERRED = "inferred"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cell:
    """A size bin of a collective and group shape, and its verdict."""

    system: str
    num_nodes: int
    num_ranks: int
    collective: str
    bin: int
    action: int
    config: str
    verdict: Verdict = Verdict.ABSTAINS
    reason: str = ""
    runs: int = 0
    #: NCCL's own time / the config's - 1, its p value and 95 % interval; None: too few runs.
    gain: float | None = None
    p_value: float | None = None
    low: float | None = None
    high: float | None = None
    #: By the policy; None where it abstains.
    predicted: float | None = None
    #: Read back in the policy's data, or in the fresh runs where the test is about them.
    channels: int | None = None
    own_channels: int | None = None
    #: Loss to stay below where it takes fewer channels; None: it must gain.
    slack: float | None = None

    @property
    def loss(self) -> float | None:
        """The loss that it is tested to stay below; None: it must gain."""
        used, own = self.channels, self.own_channels
        return self.slack if used is not None and own is not None and used < own else None

    @property
    def place(self) -> Place:
        """The place of its support."""
        return self.system, self.num_nodes, self.num_ranks

    @property
    def key(self) -> tuple[str, int, int, str, int]:
        """Unique among a policy's cells."""
        return *self.place, self.collective, self.bin

    @property
    def acts(self) -> bool:
        """Whether tables act there."""
        return self.verdict in {Verdict.PASSED, Verdict.INFERRED}

    @property
    def is_wanted(self) -> bool:
        """Whether the policy itself acts there."""
        return self.verdict is not Verdict.ABSTAINS


def place_of(support: Support) -> Place:
    """The place of its cells."""
    return support.system, support.num_nodes, support.num_ranks


class FreshRuns:
    """Quiet, independent rows by support, collective, size bin and action."""

    def __init__(
        self,
        frame: pl.DataFrame,
        catalogue: Catalogue,
        *,
        known: pl.DataFrame | None = None,
        costs: pl.DataFrame | None = None,
    ) -> None:
        """`known`: where NCCL's own choice was read back; `costs`: what its model predicts."""
        self._costs = costs
        self._fresh = _rows(frame, catalogue)
        rows = with_bins(cells.with_trust(cells.tuned(frame)).filter(~pl.col("is_trusted")))
        self._untrusted = rows.with_columns(catalogue.actions(rows))
        read_back = ("actual_algorithm", "actual_protocol")
        told = [self._fresh, *([] if known is None else [_rows(known, catalogue)])]
        own = [rows.filter(action=ABSTAIN_ACTION) for rows in told]
        self._own = pl.concat([rows.select(*_WHERE, *read_back).unique() for rows in own])
        bands = cells.noise_bands(cells.quiet(cells.tuned(frame)))
        self._bands = {(system, collective): band for system, collective, band in bands.iter_rows()}

    def test(
        self,
        cells: Sequence[Cell],
        supports: Mapping[Place, Support],
        max_channels: int | None = None,
        *,
        as_known: bool = False,
    ) -> list[Cell]:
        """The cells with runs, gain and a one-sided moderated t-test, or why there is none.

        On ln of paired ratios, one a run: what slows all of a run cancels. The p value is that of a
        gain of `least_gain` or less. With `as_known` a config may take no more channels, and NCCL's
        own choice no fewer, than the cells say.
        """
        found, tested = list(cells), []
        for i, cell in enumerate(cells):
            support = supports[cell.place]
            gains = self.gains(support, cell.collective, [cell.bin], cell.action)
            gain = float(np.expm1(np.median(gains))) if len(gains) else None
            tried = replace(cell, runs=len(gains), gain=gain)
            if len(gains) and (cell.slack is not None or max_channels is not None):
                used, own = (self._channels(support, cell, a) for a in (cell.action, 0))
                tried = replace(tried, channels=used, own_channels=own)
            least = self.least_gain(support, tried)
            reason = (
                self._fault(support, cell)
                or self._too_few(support, tried)
                or _too_many(tried, max_channels)
                or (_other_channels(cell, tried) if as_known and tried.loss is not None else "")
                or ("the noise band is not known" if least is None else "")
            )
            if not reason and least is not None:
                tested.append((i, gains, least))
            found[i] = replace(tried, reason=reason)
        of_bins = zip(tested, *shrunk([gains for _, gains, _ in tested]), strict=True)
        for (i, gains, least), variance, df in of_bins:
            mean, error = np.mean(gains), np.sqrt(variance / len(gains))
            reach = stats.t.ppf(0.975, df) * error
            low, high = (float(np.expm1(end)) for end in (mean - reach, mean + reach))
            p_value = float(stats.t.sf((mean - least) / error, df))
            found[i] = replace(found[i], p_value=p_value, low=low, high=high)
        return found

    def gains(
        self, support: Support, collective: str, bins: Sequence[int], action: int
    ) -> npt.NDArray[np.float64]:
        """(runs,) ln(default / config), the mean over sizes of the bins, for runs with both."""
        rows = self._of(support, collective, bins)
        log_us = pl.col("time_us").log().median()
        default, config = (
            rows.filter(action=which).group_by(_PAIR).agg(log_us.alias(name))
            for which, name in ((ABSTAIN_ACTION, "default"), (action, "config"))
        )
        pairs = default.join(config, on=_PAIR, how="inner", nulls_equal=True)
        runs = pairs.group_by(_RUN).agg(gain=(pl.col("default") - pl.col("config")).mean())
        return runs.sort(_RUN)["gain"].to_numpy().astype(np.float64)

    def within_runs(self, support: Support, collective: str, bins: Sequence[int]) -> float:
        """Variance of a run's mean ln default time by noise within processes; 0.0 if unknown."""
        rows = self._of(support, collective, bins, action=ABSTAIN_ACTION)
        by_place = rows.group_by([*_PAIR, "run", "default_scope"])
        repeated = by_place.agg(var=pl.col("time_us").log().var()).drop_nulls("var")
        if repeated.is_empty():
            return 0.0
        num_means = repeated.select(_PAIR).n_unique() / repeated.select(_RUN).n_unique()
        return float(np.mean(repeated["var"].to_numpy())) / num_means

    def least_gain(self, support: Support, cell: Cell) -> float | None:
        """ln(default / config) that the mean must exceed; None if the noise is not known."""
        if cell.loss is not None:
            return -float(np.log1p(cell.loss))
        band = self.band(support, cell.collective)
        return None if band is None else float(np.log1p(band))

    def band(self, support: Support, collective: str) -> float | None:
        """The noise band of the fresh runs; None if unknown."""
        return self._bands.get((support.system, collective))

    def measured_bins(self, support: Support, collective: str) -> set[int]:
        """Size bins in which NCCL's default was measured."""
        return set(self._of(support, collective, action=ABSTAIN_ACTION)["bin"])

    def one_default(self, support: Support, collective: str, bins: Sequence[int]) -> bool:
        """Whether NCCL's own cell is one in all `bins`: read back, else by its cost model."""
        rows = _of(self._own, support).filter(collective=collective)
        of_bins = [rows.filter(bin=each)[:, -2:].unique().rows() for each in bins]
        read_back = [None if len(ran) != 1 or None in ran[0] else ran[0] for ran in of_bins]
        seen = {*read_back} - {None}
        if len(seen) != 1 or read_back[0] is None or read_back[-1] is None:
            return False
        if None not in read_back:
            return True
        predicted = self._predicted(support, collective, bins)
        told = {each for each, ran in zip(predicted, read_back, strict=True) if ran is None}
        return {predicted[0], predicted[-1]} == seen == told

    def _of(
        self, support: Support, collective: str, bins: Sequence[int] | None = None, **chosen: Any
    ) -> pl.DataFrame:
        rows = _of(self._fresh, support).filter(collective=collective, **chosen)
        return rows if bins is None else rows.filter(pl.col("bin").is_in(list(bins)))

    def _fault(self, support: Support, cell: Cell) -> str:
        """What a single attempt holds against the cell's config, however fast it is."""
        place = {"collective": cell.collective, "action": cell.action}
        against = _of(self._untrusted, support).filter(pl.col("bin") <= cell.bin, **place)
        if against.is_empty():
            return ""
        lost = against.filter(pl.col("time_us").is_null()).sort("size_bytes")
        if lost.is_empty():
            return "wrong results in fresh runs"
        size, status = lost.select("size_bytes", "status").row(0)
        return f"an attempt {status.replace('_', ' ')} at {size_label(size)} in fresh runs"

    def _too_few(self, support: Support, cell: Cell) -> str:
        """Why there are too few runs, if so."""
        if not cell.runs and cell.bin not in self.measured_bins(support, cell.collective):
            return "it was not measured, and its neighbours did not both pass with this config"
        if cell.runs >= MIN_RUNS:
            return ""
        reason = f"{cell.runs} fresh runs of both, not {MIN_RUNS}"
        config, own = (
            {
                *self._of(support, cell.collective, [cell.bin], action=a)
                .select("sweep", "run")
                .rows()
            }
            for a in (cell.action, ABSTAIN_ACTION)
        )
        if len(config & own) < MIN_RUNS <= min(len(config), len(own)):
            reason += (
                f": {len(config)} have the config and {len(own)} NCCL's own choice, not together; "
                "a log is one run: import a log for each job, with the processes of both, or a CSV "
                "with a column 'run'"
            )
        return reason

    def _channels(self, support: Support, cell: Cell, action: int) -> int | None:
        rows = self._of(support, cell.collective, [cell.bin], action=action)
        used = rows["actual_num_channels"].drop_nulls().to_list()
        return (min if action == ABSTAIN_ACTION else max)(used, default=None)

    def _predicted(
        self, support: Support, collective: str, bins: Sequence[int]
    ) -> list[tuple[str, str] | None]:
        if self._costs is None:
            return [None] * len(bins)
        sizes = [bin_center_bytes(each) for each in bins]
        times = log_costs(cold_tasks(support, Collective.parse(collective), sizes), self._costs)
        names = [(algorithm.wire, protocol.wire) for algorithm, protocol in CELLS]
        return [None if np.isnan(each).all() else names[np.nanargmin(each)] for each in times]


def costs_of(*data_dirs: Path) -> pl.DataFrame:
    """NCCL's costs; for each group from the first data set that has any."""
    found = read_costs(data_dirs[0])
    for each in data_dirs[1:]:
        more = read_costs(each).join(found, on=COST_KEY, how="anti", nulls_equal=True)
        found = pl.concat([found, more])
    return found


def _rows(frame: pl.DataFrame, catalogue: Catalogue) -> pl.DataFrame:
    rows = with_split(cells.independent(cells.comparable(cells.quiet(cells.tuned(frame)))))
    job = pl.col("run").str.replace(_PROCESS, "$1").alias("job")
    return rows.with_columns(catalogue.actions(rows), job).drop_nulls("action")


def _of(rows: pl.DataFrame, support: Support) -> pl.DataFrame:
    same = rows.filter(
        system=support.system,
        num_nodes=support.num_nodes,
        ranks_per_node=support.ranks_per_node,
        launch_profile=support.launch_profile,
    )
    return cells.of_minor_release(same, support.nccl_version)


def shrunk(
    gains: Sequence[npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(B,) variances of bins' gains by run, shrunk over them, and degrees of freedom (B,) of a t.

    The prior's are Smyth's, by the moments of log variances, but bounded, since sizes of one
    process are no independent witnesses; and no variance falls below the bin's own: with a slow
    call in one run or two, the mean is no more than twice its error.
    """
    freedom = np.array([len(each) - 1.0 for each in gains])
    own = np.maximum([np.var(each, ddof=1) for each in gains], _LEAST_VARIANCE)
    if len(own) < 2:
        return own, freedom
    logs = np.log(own) - special.digamma(freedom / 2) + np.log(freedom / 2)
    uneven = np.var(logs, ddof=1) - np.mean(special.polygamma(1, freedom / 2))
    most = min(_MOST_PRIOR, _PRIOR_SHARE * float(freedom.sum() - freedom.max()))
    prior = most
    if uneven > special.polygamma(1, most / 2):
        prior = 2 * optimize.brentq(lambda x: special.polygamma(1, x) - uneven, 1e-6, most / 2)
    typical = np.exp(np.mean(logs))
    return np.maximum(own, (prior * typical + freedom * own) / (prior + freedom)), prior + freedom


def passing(
    p_values: npt.NDArray[np.float64], q: float, weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    """(B,) which hypotheses are rejected at false discovery rate `q` (Benjamini, Hochberg 1995).

    `weights` (B,) are known before the data (Genovese, Roeder and Wasserman 2006).
    """
    count = max(len(p_values), 1)
    weighted = p_values * (weights.sum() / count) / weights
    ordered = np.sort(weighted)
    below = ordered[ordered <= q * (np.arange(len(p_values)) + 1) / count]
    passed: npt.NDArray[np.bool_] = weighted <= below.max(initial=-np.inf)
    return passed


def _too_many(cell: Cell, max_channels: int | None) -> str:
    bounds = [cell.own_channels] if cell.slack is not None else []
    bounds += [] if max_channels is None else [max_channels]
    known = [each for each in bounds if each is not None]
    if bounds and (cell.channels is None or len(known) < len(bounds)):
        return "its channels, or those of NCCL's own choice, were not read back in the fresh runs"
    if cell.channels is not None and cell.channels > min(known, default=cell.channels):
        return f"it took {cell.channels} channels, and may take {min(known)}"
    return ""


def _other_channels(known: Cell, fresh: Cell) -> str:
    was, own_was = known.channels or 0, known.own_channels or 0
    now, own_now = fresh.channels or 0, fresh.own_channels or 0
    if now <= was and own_now >= own_was:
        return ""
    return (
        f"its slack is of {was} channels in place of {own_was}, and the fresh runs took {now} in "
        f"place of {own_now}"
    )
