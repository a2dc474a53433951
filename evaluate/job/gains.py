"""Draws of what each config gains over NCCL's own choice, for the kinds of calls of a job.

A sweep tells it through the belief (`dynamiccl/belief.py`), which is asked at the job's own sizes
and says how sure it is; or a simulated system does. Nothing is known of a config that was not
measured within an octave, or where NCCL's choice was not: as in a decision table.

K kinds, D draws, A configs of a table, NCCL's own choice the first.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

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
from dynamiccl.evaluate.gate.evidence import minor_of
from dynamiccl.evaluate.job.calls import Kind
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call, System

#: Collective, nodes and ranks a node: a table of the belief.
Key = tuple[str, int, int]
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
        same = [v for v in held if version is None or minor_of(v) == minor_of(version)]
        self._is_other_version = bool(held) and not same
        #: The job's release, else the newest of its minor release, else the newest.
        self.nccl_version = version if version in same else (same or held or [None])[-1]
        rows = rows.filter(pl.col("nccl_version").eq_missing(pl.lit(self.nccl_version)))
        self._catalogue = Catalogue.from_frame(rows)
        self._grid = task_grid(rows, self._catalogue, list(Split))
        if not self._grid.tasks.height:
            raise NotEnoughData(
                f"the data hold no task of {self.system} in the untouched environment, alone on "
                "its nodes, with NCCL's own choice and two configs; measure with "
                "'dynamiccl-collect run' or name other --data"
            )
        self._ran, self._losses = _read_back(rows), losses_of(rows)

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) with measured gains."""
        return self._grid.tasks.select(_SHAPE[1:]).unique().sort(_SHAPE[1:]).rows()

    def gains(self, kinds: Sequence[Kind]) -> list[Gains | str]:
        """(K,) the gains of each kind of calls, or why they are not known."""
        if self._is_other_version:
            other = f"measured under NCCL {self.nccl_version}; the job ran another minor version"
            return [other] * len(kinds)
        told: dict[Kind, Gains | str] = {kind: unplaced(kind, self.shapes) for kind in kinds}
        for key in dict.fromkeys(_key(kind) for kind, why in told.items() if not why):
            told |= self._of_table(key, [k for k in kinds if not told[k] and _key(k) == key])
        return [told[kind] for kind in kinds]

    def _of_table(self, key: Key, kinds: Sequence[Kind]) -> dict[Kind, Gains | str]:
        tasks = self._grid.tasks.with_row_index("row").filter(**dict(zip(_SHAPE, key, strict=True)))
        if tasks.is_empty():
            return dict.fromkeys(kinds, f"{key[0]} on {key[1]} x {key[2]} was not measured")
        rows, measured = tasks["row"].to_numpy().astype(np.int64), tasks["size_bytes"].to_numpy()
        sizes = np.unique([*measured, *(kind.size_bytes for kind in kinds)])
        ran = {int(size): self._ran.get((*key, int(size))) for size in measured}
        asked = {kind.size_bytes: kind.cell for kind in kinds}
        below, above = neighbours(np.searchsorted(sizes, measured), len(sizes))
        read_back = [ran.get(size) for size in sizes.tolist()]
        own = tuple(
            here or asked.get(size) or (read_back[b] if read_back[b] == read_back[a] else None)
            for size, here, b, a in zip(sizes.tolist(), read_back, below, above, strict=True)
        )
        actions = np.flatnonzero(self._grid.mask[rows].any(axis=0))
        configs = tuple(self._catalogue.configs[action] for action in actions)
        grid = Grid(tuple(np.log2(sizes).tolist()), configs, own)
        table = rows, np.searchsorted(sizes, measured), actions
        belief, shown = self._believe(table, grid), self._shown(table, grid)
        if shown is None:
            why = "measured in one run: what luck in choosing adds cannot be told"
            return dict.fromkeys(kinds, why)
        draws, best = belief.draws(DRAWS, np.random.default_rng(0)), belief.decide()
        # What asks for NCCL's own choice gains nothing: what was measured of it is noise.
        is_own = np.array([[o is not None and c == Config(*o) for c in configs] for o in own])
        is_own[:, ABSTAIN_ACTION] = True
        draws = np.where(is_own, 0.0, draws * shown[:, None, None])
        draws[:, ~belief.is_near] = np.nan
        draws[:, :, ABSTAIN_ACTION] = 0.0
        order = np.argsort(measured)
        lines = np.log(measured[order]), np.log(self._grid.default_us[rows][order])
        found = dict[Kind, Gains | str]()
        for kind in kinds:
            place = int(np.searchsorted(sizes, kind.size_bytes))
            around = {cell for size, cell in ran.items() if 0.5 <= size / kind.size_bytes <= 2.0}
            if not belief.is_near[place].any():
                found[kind] = "no size within an octave was measured on both sides"
            elif kind.cell and around and None not in around and kind.cell not in around:
                told = " and ".join(sorted(f"{a.wire}/{p.wire}" for a, p in filter(None, around)))
                found[kind] = f"NCCL ran {kind.ran} in the job and {told} in the sweep"
            else:
                taken = ABSTAIN_ACTION if is_own[place, best[place]] else int(best[place])
                # As it is at the ends, where the sweep ends before the job's size.
                default_us = float(np.exp(np.interp(np.log(kind.size_bytes), *lines)))
                lost = self._lost(key, kind, configs)
                found[kind] = Gains(configs, draws[:, place], taken, default_us, lost)
        return found

    def _lost(self, key: Key, kind: Kind, configs: Sequence[Config]) -> Floats | None:
        """(E, A) what compute loses at the measured size that lies nearest."""
        collective, nodes, per_node = key
        losses = near(self._losses.get((collective, nodes, nodes * per_node), {}), kind.bin)
        return losses_at(losses, configs)[0] if losses else None

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
        self._system, self._configs = system, tuple(configs)
        #: (D, 1) by how much the model is off, alike for all kinds.
        self._off = _MODEL_ERROR * np.random.default_rng(0).standard_normal((DRAWS, 1))

    @property
    def shapes(self) -> Sequence[tuple[int, int]]:
        """(nodes, ranks a node) of the system."""
        return [(group.num_nodes, group.ranks_per_node) for group in self._system.groups()]

    def gains(self, kinds: Sequence[Kind]) -> list[Gains | str]:
        """(K,) the gains of each kind of calls, or why they are not known."""
        return [unplaced(kind, self.shapes) or self._of_kind(kind) for kind in kinds]

    def _of_kind(self, kind: Kind) -> Gains | str:
        name, nodes, per_node = _key(kind)
        group, collective = Group(nodes, per_node), Collective.parse(name)
        if group not in self._system.groups() or collective not in self._system.collectives():
            return f"the model has no {name} on {nodes} x {per_node}"
        call = Call(group, collective, kind.size_bytes)
        cells = [Config(*cell) for cell in self._system.cells(group, collective)]
        configs = tuple(dict.fromkeys((ABSTAIN, *cells, *self._configs)))
        times = np.full(len(configs), np.nan)
        for action, config in enumerate(configs):
            with suppress(KeyError):  # no such cell
                times[action] = self._system.parts(call, config).quiet_us
        gains = np.log(times[ABSTAIN_ACTION] / times)
        draws = gains + np.where(np.arange(len(configs)) == ABSTAIN_ACTION, 0.0, self._off)
        return Gains(configs, draws, int(np.nanargmax(gains)), float(times[ABSTAIN_ACTION]))


#: What tells gains.
Source = Measured | Modelled


def unplaced(kind: Kind, shapes: Sequence[tuple[int, int]]) -> str:
    """Why nothing is known of a kind whose place the trace does not tell, and the fix; or ""."""
    if kind.num_ranks is None:
        return "the trace does not say how many ranks"
    if kind.num_nodes is not None:
        return ""
    fitting = [f"{n}x{per}" for n, per in shapes if n * per == kind.num_ranks]
    if not fitting:
        told = f"no group of {kind.num_ranks} ranks is known"
        return f"{told}; --group NODESxRANKS tells their placement, for a sweep of it"
    # Had one shape so many ranks, it would have been taken.
    told = f"the trace does not say on how many nodes its {kind.num_ranks} ranks are"
    return f"{told}: --group, one of {', '.join(fitting)}"


def _key(kind: Kind) -> Key:
    """Collective, nodes and ranks a node of a kind that has a place."""
    nodes, ranks = kind.num_nodes or 1, kind.num_ranks or 1
    return kind.collective, nodes, ranks // nodes


def _read_back(rows: pl.DataFrame) -> dict[tuple[str, int, int, int], Cell]:
    """What NCCL ran, by collective, shape and size, where all rows that tell it agree."""
    told = rows.filter("is_default").drop_nulls(["actual_algorithm", "actual_protocol"])
    agree = told.group_by([*_SHAPE, "size_bytes"]).agg(
        pl.col("actual_algorithm", "actual_protocol").unique()
    )
    return {
        (collective, nodes, per_node, size): (Algorithm.parse(one[0]), Protocol.parse(other[0]))
        for collective, nodes, per_node, size, one, other in agree.iter_rows()
        if len(one) == len(other) == 1
    }
