"""Draws of what each config gains over NCCL's own choice, for the kinds of calls of a job.

A sweep tells it through the belief (`dynamiccl/belief.py`), which is asked at the job's own sizes
and says how sure it is; or a simulated system does. Nothing is known of a config that was not
measured within an octave, or where NCCL's choice was not: as in a decision table.

K kinds of calls (rows of `Job.kinds`), D draws, A configs of a table, NCCL's own choice the first.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.belief import Belief, doubted, neighbours, prior_of
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.job_tasks import losses_at, losses_of, near
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.splits import Split
from dynamiccl.drawn_worlds import Cell, Floats, Grid, Ints
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import System

_SHAPE: Final = ("collective", "num_nodes", "ranks_per_node")
#: Tasks, the numbers of their sizes, and the actions.
_Table = tuple[Ints, Ints, Ints]
DRAWS: Final = 400
#: Parts of the runs that are left out in turn.
_FOLDS: Final = 3
#: Standard deviation of log(model / machine) of a config's time against another's. Fitted models of
#: H100 nodes miss AllReduce by 10 to 20 % below 64 MB and by 4 to 8 % above
#: (meta-pytorch/autoparallel, pull request 425); two configs share a part of it.
_MODEL_ERROR: Final = 0.10


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
    #: where that is not known. None: nobody measured it near this size.
    lost: Floats | None = None


class Measured:
    """Gains from a sweep's measurements on one system, in the default environment."""

    is_modelled: Final = False

    def __init__(self, frame: pl.DataFrame, system: str | None, version: str | None) -> None:
        """Take the rows that may be compared; `version` is the job's NCCL, where it is known.

        Raises UserError where the data hold several systems and none is named, UnknownName for one
        that they do not hold, and NotEnoughData without a task.
        """
        names = frame["system"].unique().sort().to_list()
        if system is None and len(names) > 1:
            raise UserError(
                f"the data hold {len(names)} systems; name one: --system {' or '.join(names)}"
            )
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
        self._ran, self._losses = _read_back(rows), losses_of(rows)
        #: (nodes, ranks a node) with measured gains.
        self.shapes = self._grid.tasks.select(_SHAPE[1:]).unique().sort(_SHAPE[1:]).rows()

    def of_table(self, kinds: pl.DataFrame) -> list[Gains | str]:
        """(K,) the gains of kinds of one collective and shape, or why they are not known."""
        collective, nodes, per_node = key = kinds.select(_SHAPE).row(0)
        if self._is_other_version:
            other = "the job ran another minor version"
            return [f"measured under NCCL {self.nccl_version}; {other}"] * kinds.height
        tasks = self._grid.tasks.with_row_index("row").sort("size_bytes", maintain_order=True)
        tasks = tasks.filter(**dict(zip(_SHAPE, key, strict=True)))
        if tasks.is_empty():
            return [f"{collective} on {nodes} x {per_node} was not measured"] * kinds.height
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
                lost = losses_at(losses, configs)[0] if losses else None
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


class Modelled:
    """Quiet times of a simulated system."""

    is_modelled: Final = True

    def __init__(self, system: System, configs: Sequence[Config] = ()) -> None:
        """Take a system; beside its own algorithms and protocols, it is asked for `configs`."""
        self.system = system.name
        self.nccl_version: str | None = str(system.nccl_version)
        self.shapes = [(group.num_nodes, group.ranks_per_node) for group in system.groups()]
        self._system, self._configs = system, tuple(configs)
        #: (D, 1) by how much the model is off, alike for all kinds.
        self._off = _MODEL_ERROR * np.random.default_rng(0).standard_normal((DRAWS, 1))

    def of_table(self, kinds: pl.DataFrame) -> list[Gains | str]:
        """As `Measured.of_table`."""
        name, nodes, per_node = kinds.select(_SHAPE).row(0)
        group, collective = Group(nodes, per_node), Collective.parse(name)
        if group not in self._system.groups() or collective not in self._system.collectives():
            return [f"the model has no {name} on {nodes} x {per_node}"] * kinds.height
        cells = [Config(*cell) for cell in self._system.cells(group, collective)]
        configs = tuple(dict.fromkeys((ABSTAIN, *cells, *self._configs)))
        off = np.where(np.arange(len(configs)) == ABSTAIN_ACTION, 0.0, self._off)
        found: list[Gains | str] = []
        for size in kinds["size_bytes"]:
            call, times = Call(group, collective, size), np.full(len(configs), np.nan)
            for action, config in enumerate(configs):
                with suppress(KeyError):  # no such cell
                    times[action] = self._system.parts(call, config).quiet_us
            gains, own_us = np.log(times[ABSTAIN_ACTION] / times), float(times[ABSTAIN_ACTION])
            found.append(Gains(configs, gains + off, int(np.nanargmax(gains)), own_us))
        return found


#: What tells gains.
Source = Measured | Modelled


def gains_of(source: Source, kinds: pl.DataFrame) -> list[Gains | str]:
    """(K,) the gains of each kind of calls, or why they are not known."""
    places = kinds.select("why_not", "num_nodes", "num_ranks").iter_rows()
    told: list[Gains | str] = [_unplaced(place, source.shapes) for place in places]
    per_node = pl.col("num_ranks") // pl.col("num_nodes")
    numbered = kinds.with_row_index("kind").with_columns(ranks_per_node=per_node)
    placed = numbered.filter([not why for why in told])
    for _, table in placed.group_by(_SHAPE, maintain_order=True):
        for kind, found in zip(table["kind"], source.of_table(table), strict=True):
            told[kind] = found
    return told


def _unplaced(place: tuple[Any, ...], shapes: Sequence[tuple[int, int]]) -> str:
    """Why no gain is known of a kind: no tuner is asked, or its place is not told; or ""."""
    why_not, nodes, ranks = place
    if why_not or nodes is not None:
        return str(why_not)
    if ranks is None:
        return "the trace does not say how many ranks"
    fitting = [f"{n}x{per}" for n, per in shapes if n * per == ranks]
    if not fitting:
        told = f"no group of {ranks} ranks is known"
        return f"{told}; --group NODESxRANKS tells their placement, for a sweep of it"
    # Had one shape so many ranks, it would have been taken.
    told = f"the trace does not say on how many nodes its {ranks} ranks are"
    return f"{told}: --group, one of {', '.join(fitting)}"


def _cell(ran: str | None) -> Cell | None:
    """What an `algorithm/protocol` names."""
    algorithm, _, protocol = (ran or "").partition("/")
    return (Algorithm.parse(algorithm), Protocol.parse(protocol)) if protocol else None


def _read_back(rows: pl.DataFrame) -> dict[tuple[str, int, int, int], Cell | None]:
    """What NCCL ran, by collective, shape and size, where all rows that tell it agree."""
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    told = rows.filter("is_default").select(*_SHAPE, "size_bytes", ran=ran).drop_nulls().unique()
    agree = told.filter(pl.len().over(*_SHAPE, "size_bytes") == 1)
    return {(*place,): _cell(cell) for *place, cell in agree.iter_rows()}
