"""Draws of what each config gains over NCCL's own choice, for the kinds of calls of a job.

A sweep tells it through the belief (`dynamiccl/belief.py`), which is asked at the job's own sizes
and says how sure it is. Nothing is known of a config that was not measured within an octave, or
where NCCL's choice was not: as in a decision table.

K kinds of calls (rows of `Job.kinds`), D draws, A configs of a table, NCCL's own choice the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.belief import Belief, doubted, neighbours, prior_of
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import run_names, task_grid
from dynamiccl.datasets.objective import losses_at, losses_of, near, priced
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.splits import Split
from dynamiccl.drawn_worlds import Cell, Floats, Grid, Ints
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Config, NcclVersion, Protocol

_SHAPE: Final = ("collective", "num_nodes", "ranks_per_node")
#: Tasks, the numbers of their sizes, and the actions.
_Table = tuple[Ints, Ints, Ints]
DRAWS: Final = 400
ROWS: Final = "matmul"
PRICE: Final = "sm_price"
#: Parts of the runs that are left out in turn.
_FOLDS: Final = 3


@dataclass(frozen=True, slots=True)
class Gains:
    """What is known of one kind of calls."""

    configs: tuple[Config, ...]
    #: (D, A) draws of ln(NCCL's own time / a config's); NaN where it is not known.
    draws: Floats
    #: The action that the best table has: NCCL's own where no gain is sure.
    best: int
    #: us of NCCL's own choice in the benchmark.
    default_us: float
    #: (E, A) of E kinds of compute, the share of its speed that each loses while a call runs; NaN
    #: where that is not known. By ROWS beside products near this size, which count first; by PRICE.
    lost: dict[str, Floats]


class Measured:
    """Gains from a sweep's measurements on one system, in the default environment."""

    def __init__(
        self,
        frame: pl.DataFrame,
        system: str | None = None,
        version: str | None = None,
        sm_price: float = 0.0,
    ) -> None:
        """Take the rows that may be compared; `version` is the job's NCCL, where it is known.

        `sm_price`: share of its speed that compute loses to a channel at most, where that was not
        measured. Raises UnknownName where the data do not hold the system, UserError where they
        hold several and none is named, and NotEnoughData without a task.
        """
        names = frame["system"].unique().sort().to_list()
        if system is None and len(names) > 1:
            raise UserError(f"{len(names)} systems; name one: --system {' or '.join(names)}")
        if system is not None and system not in names:
            raise UnknownName("system", system, names, where="--system")
        self.system = system or str(names[0])
        rows = frame.filter(system=self.system, launch_profile=DEFAULT_PROFILE)
        held = sorted(rows["nccl_version"].drop_nulls().unique(), key=NcclVersion.parse)
        minor = NcclVersion.minor_of
        same = [each for each in held if version is None or minor(each) == minor(version)]
        #: The job's release, else the newest of its minor release, else the newest.
        self.nccl_version = version if version in same else (same or held or [None])[-1]
        rows = rows.filter(pl.col("nccl_version").eq_missing(pl.lit(self.nccl_version)))
        self._is_other_version = bool(held) and not same
        self._catalogue = Catalogue.from_frame(rows)
        self._grid = task_grid(rows, self._catalogue, list(Split))
        if not self._grid.tasks.height:
            raise NotEnoughData(
                f"the data hold no task of {self.system} in the untouched environment, alone on "
                "its nodes, with NCCL's own choice and two configs; measure with "
                "'dynamiccl-collect run' or name other --data"
            )
        self.is_simulated = bool(self._grid.tasks["simulated"].all())
        self._ran, self._losses = _read_back(rows), losses_of(rows)
        #: As given; 0: none.
        self.sm_price, self.runs = sm_price, run_names(rows)

    def of(self, kinds: pl.DataFrame) -> list[Gains | str]:
        """(K,) the gains of each kind of calls, or why they are not known."""
        told: list[Gains | str] = kinds["why_not"].to_list()
        per_node = pl.col("num_ranks") // pl.col("num_nodes")
        asking = kinds.filter(pl.col("why_not") == "").with_columns(ranks_per_node=per_node)
        for table in asking.partition_by(_SHAPE, maintain_order=True):
            for kind, found in zip(table["kind"], self._of_table(table), strict=True):
                told[kind] = found
        return told

    def _why_unknown(self, collective: str, nodes: int | None, ranks: int | None) -> str:
        if self._is_other_version:
            return f"measured under NCCL {self.nccl_version}; the job ran another minor version"
        if ranks is None:
            return "the trace does not say how many ranks make it"
        if nodes is None:
            return "on how many nodes its ranks lie evenly is not known (--ranks-per-node)"
        return f"{collective} on {nodes} x {ranks // nodes} was not measured"

    def _of_table(self, kinds: pl.DataFrame) -> list[Gains | str]:
        """As `of`, for kinds of one collective and shape."""
        collective, nodes, per_node = key = kinds.select(_SHAPE).row(0)
        tasks = self._grid.tasks.with_row_index("row").sort("size_bytes", maintain_order=True)
        tasks = tasks.join(kinds.head(1), on=_SHAPE, how="semi", maintain_order="left")
        if tasks.is_empty() or self._is_other_version:
            return [self._why_unknown(collective, nodes, count) for count in kinds["num_ranks"]]
        rows, measured = (tasks[name].to_numpy().astype(np.int64) for name in ("row", "size_bytes"))
        asked = {size: _cell(ran) for size, ran in kinds.select("size_bytes", "ran").iter_rows()}
        sizes = np.unique([*measured, *asked])
        at = np.searchsorted(sizes, measured)
        # What NCCL's own choice is: as read back; in the job; at both measured sizes around.
        read = [self._ran.get((*key, size)) for size in sizes.tolist()]
        around = [read[b] if read[b] == read[a] else None for b, a in neighbours(at, len(sizes)).T]
        own = tuple(
            here or asked.get(size) or beside
            for size, here, beside in zip(sizes.tolist(), read, around, strict=True)
        )
        actions = np.flatnonzero(self._grid.mask[rows].any(axis=0))
        configs = tuple(self._catalogue.configs[action] for action in actions)
        grid = Grid(tuple(np.log2(sizes).tolist()), configs, own)
        table = rows, at, actions
        belief, shown = self._believe(table, grid), self._shown(table, grid)
        if shown is None:
            return ["measured in one run: what luck in choosing adds cannot be told"] * kinds.height
        # What asks for NCCL's own choice gains nothing: what was measured of it is noise.
        is_own = np.array([[o is not None and c == Config(*o) for c in configs] for o in own])
        draws = belief.draws(DRAWS, np.random.default_rng(0)) * shown[:, None, None]
        draws[:, is_own] = 0.0
        draws[:, ~belief.is_near] = np.nan
        draws[:, :, ABSTAIN_ACTION] = 0.0
        lines = np.log(measured), np.log(self._grid.default_us[rows])
        found: list[Gains | str] = []
        for size, index, ran in kinds.select("size_bytes", "bin", "ran").iter_rows():
            number, cell = int(np.searchsorted(sizes, size)), _cell(ran)
            near_by = {read[n] for n in at if 0.5 <= sizes[n] / size <= 2.0}
            if not belief.is_near[number].any():
                found.append("no size within an octave was measured on both sides")
            elif cell and near_by and not near_by & {cell, None}:
                told = " and ".join(sorted(f"{a.wire}/{p.wire}" for a, p in filter(None, near_by)))
                found.append(f"NCCL ran {ran} in the job and {told} in the sweep")
            else:
                best = int(belief.decide()[number])
                best = ABSTAIN_ACTION if is_own[number, best] else best
                # As it is at the ends, where the sweep ends before the job's size.
                default_us = float(np.exp(np.interp(np.log(size), *lines)))
                losses = near(self._losses.get((collective, nodes, nodes * per_node), {}), index)
                lost = {ROWS: losses_at(losses, configs)[0]} if losses else {}
                if self.sm_price and self._grid.channels is not None:
                    row = rows[np.abs(lines[0] - np.log(size)).argmin()]
                    lost[PRICE], _ = priced(self._grid.channels[row, actions], self.sm_price)
                found.append(Gains(configs, draws[:, number], best, default_us, lost))
        return found

    def _believe(self, table: _Table, grid: Grid, left_out: Sequence[int] = ()) -> Belief:
        cells = self._grid.cells(*table, grid.log2_sizes, left_out)
        places, log_us, variance, repeats, _ = cells
        prior = prior_of(grid)
        return Belief(prior, places, log_us, doubted(prior, places, log_us, variance, repeats))

    def _shown(self, table: _Table, grid: Grid) -> Floats | None:
        """(D,) what left-out runs show of the gains that tables of the other runs claim.

        Of configs that are all alike the one that luck made the fastest is chosen. None for a
        single run.
        """
        rows, at, actions = table
        times, runs_of = self._grid.samples, self._grid.runs
        cells = [(row, int(action)) for row in rows.tolist() for action in actions]
        runs = np.unique(np.concatenate([runs_of[c] for c in cells if c in runs_of]))
        if len(runs) < 2:
            return None
        claimed, found = list[float](), list[float]()
        for fold in np.array_split(runs, min(len(runs), _FOLDS)):
            belief = self._believe(table, grid, fold.tolist())
            for row, size, action in zip(rows, at, belief.decide()[at], strict=True):
                own, other = (
                    np.log(times[cell][np.isin(runs_of[cell], fold)])
                    for cell in ((int(row), ABSTAIN_ACTION), (int(row), int(actions[action])))
                )
                if action != ABSTAIN_ACTION and len(own) and len(other):
                    claimed.append(float(belief.gain[size, action]))
                    found.append(float(own.mean() - other.mean()))
        if not claimed:
            return np.ones(DRAWS)
        # All of it at most, with Student's t over the claims.
        share = min(float(np.mean(found) / np.mean(claimed)), 1.0)
        spread = np.std(found, ddof=1) if len(found) > 1 else np.abs(found).max()
        drawn = np.random.default_rng(2).standard_t(max(len(found) - 1, 1), DRAWS)
        off = spread / np.sqrt(len(found)) / np.mean(claimed) * drawn
        return np.asarray(np.maximum(share + off, 0.0))


def _cell(ran: str | None) -> Cell | None:
    """What an `algorithm/protocol` names."""
    algorithm, _, protocol = (ran or "").partition("/")
    return (Algorithm.parse(algorithm), Protocol.parse(protocol)) if protocol else None


def _read_back(rows: pl.DataFrame) -> dict[tuple[Any, ...], Cell | None]:
    """What NCCL ran, by collective, shape and size, where all rows that tell it agree."""
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    told = rows.filter("is_default").select(*_SHAPE, "size_bytes", ran=ran).drop_nulls().unique()
    agree = told.filter(pl.len().over(*_SHAPE, "size_bytes") == 1)
    return {tuple(place): _cell(cell) for *place, cell in agree.iter_rows()}
