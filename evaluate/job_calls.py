"""What is known of a job: its calls by kind, with times and steps, and what configs gain for each.

A *kind* is a collective in one size bin of one process group: one entry of a tuner's table. All is
of the mean rank: a call counts by the share of the traced ranks that it was seen on. Gains come
from a sweep through the belief (`dynamiccl/belief.py`), asked at the job's own sizes.

C calls of K kinds, D draws, A configs of a table, NCCL's own choice the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import polars as pl

from dynamiccl.belief import Belief, doubted, neighbours, prior_of
from dynamiccl.collect.imports import ImportOptions, recognised
from dynamiccl.collect.traces import SIGNS, read_traces
from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import placed, run_names, task_grid, with_trust
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.objective import losses_at, losses_of, near, priced
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.splits import Split, with_bins
from dynamiccl.datasets.store import part_paths, read, read_calls
from dynamiccl.drawn_worlds import Cell, Floats, Grid, Ints
from dynamiccl.errors import MissingPath, NotEnoughData, OutputError, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Config, NcclVersion, Protocol

_KIND: Final = ("collective", "bin", "num_nodes", "num_ranks", "group", "why_not")
_STEP: Final = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
_IS_TUNED: Final = pl.col("collective").is_in([collective.wire for collective in TUNED])
#: Empty: a tuner is asked.
_WHY_NOT: Final = (
    pl.when(pl.col("num_ranks") == 1)
    .then(pl.lit("one rank"))
    .when(~_IS_TUNED)
    .then(pl.lit("NCCL asks no tuner about it"))
    .when(~pl.col("asks_tuner"))
    .then(pl.coalesce(pl.format("kernel {}", "kernel"), pl.lit("another library's or path")))
    .when("decided")
    .then(pl.lit("a table of ours decided it already"))
    .otherwise(pl.lit(""))
)


@dataclass(frozen=True, slots=True)
class Job:
    """C calls of K kinds."""

    #: (K rows) `kind`, its number; `collective`, `bin`, `num_nodes`, `num_ranks` and `group` (null
    #: or empty: not told); `why_not` (empty: a tuner is asked); median `size_bytes`; number of
    #: `calls`; most frequent `ran`. Once `timed`, of the mean rank `time_us`, `exposed_us`, and
    #: `mean_us` a call.
    kinds: pl.DataFrame
    #: (C rows) `kind`; `size_bytes`; `weight` in the mean rank; `time_us`, null where unknown;
    #: `exposed`, its share without compute beside; `compute_ratio`.
    calls: pl.DataFrame
    #: Of the mean rank, with `count` and `ranks`; None without steps.
    steps: dict[str, float] | None
    nccl_version: str | None
    sources: list[str]
    #: Numbers of calls that lack something, and the share of communication that is `bound`.
    lacks: dict[str, float]
    unread: list[str]

    @property
    def whole_us(self) -> float:
        """What shares are of: the steps, or all calls without steps."""
        if self.steps is None:
            return float(self.kinds["time_us"].sum())
        return self.steps["step_us"] * self.steps["count"]

    def share_of(self, kinds: list[int]) -> float:
        """The exposed time of some kinds over the whole."""
        us = self.kinds["exposed_us"].gather(kinds)
        return float(us.sum()) / self.whole_us if self.whole_us > 0.0 else 0.0

    def timed(self, default_us: Floats) -> Self:
        """With a time for each call: its own, its kind's mean, the benchmark's (K,), by bytes."""
        benchmark = pl.Series(default_us).fill_nan(None).gather(self.calls["kind"])
        told = pl.coalesce("time_us", pl.col("time_us").mean().over("kind"), benchmark)
        bytes_told = pl.col("size_bytes").filter(told.is_not_null()).sum()
        us_per_byte = pl.when(bytes_told > 0).then(told.sum() / bytes_told).otherwise(1.0)
        us = pl.coalesce(told, pl.col("size_bytes") * us_per_byte)
        calls = self.calls.with_columns(time_us=us)
        weighted = pl.col("time_us") * pl.col("weight")
        sums = calls.group_by("kind").agg(
            time_us=weighted.sum(),
            exposed_us=(weighted * pl.col("exposed")).sum(),
            mean_us=weighted.sum() / pl.col("weight").sum(),
        )
        kinds = self.kinds.with_columns(sums.sort("kind").drop("kind"))
        return replace(self, kinds=kinds, calls=calls)


def read_job(paths: Sequence[Path], ranks_per_node: int) -> Job:
    """The job of traces or `calls` tables; raises MissingPath, and as `job_of` and readers."""
    calls, steps, files, unread = list[pl.DataFrame](), list[pl.DataFrame](), [], []
    for path in paths:
        if not path.exists():
            raise MissingPath("trace", path, "name a trace, or a directory of them or of data")
        if path.is_dir() and (part_paths(path, "calls") or any(path.glob("**/*.dcc"))):
            calls.append(read_calls(path))
            if part_paths(path, "steps"):
                steps.append(read(path, "steps"))
        else:
            files.append(path)
    if files:
        summary = recognised(files, ImportOptions())
        found = [each for each in summary.files if each.format in SIGNS and not each.remarks]
        if found:
            traces = read_traces(found, system="trace", sweep="trace")
            calls.append(pl.DataFrame(traces.calls))
            steps.append(pl.DataFrame(traces.steps))
        errors = summary.errors
        if not sum(map(len, calls + steps)):
            listed = ", ".join(map(str, files))
            why = f"{listed}: no trace of PyTorch's profiler or NCCL's Inspector; name one"
            raise errors[0] if errors else OutputError(why)
        unread = [str(error) for error in errors]
    job = job_of(pl.concat(calls), pl.concat(steps) if steps else None, ranks_per_node)
    return replace(job, unread=unread)


def job_of(calls: pl.DataFrame, steps: pl.DataFrame | None, ranks_per_node: int) -> Job:
    """Groups lie as in `placed`; raises NotEnoughData without a collective and a size."""
    known, lacks = _known(calls, ranks_per_node)
    placed, mean_step = known, None
    if steps is not None:
        # A step with unknown parts is of a rank whose GPU was not traced.
        steps = steps.drop_nulls(_STEP)
        inside = known.join(steps, on=["run", "step"], how="semi", maintain_order="left")
        if inside.height:
            placed, mean_step = inside, _mean_step(steps)
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    kinds = placed.group_by(_KIND, maintain_order=True).agg(
        size_bytes=pl.col("size_bytes").median().round().cast(pl.Int64),
        calls=pl.len(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    kinds = kinds.with_row_index("kind").cast({"kind": pl.Int64})
    numbered = kinds.select("kind", *_KIND)
    placed = placed.join(numbered, on=_KIND, how="left", nulls_equal=True, maintain_order="left")
    step = mean_step or {"ranks": 1, "exposed_us": 1.0, "hidden_us": 0.0}
    time_us = pl.coalesce("time_us", "time_at_most_us").cast(pl.Float64)
    placed = placed.with_columns(
        pl.when(time_us > 0.0).then(time_us),
        weight=(pl.col("ranks_seen") / step["ranks"]).clip(0.0, 1.0).fill_null(1.0),
        is_bound=pl.col("time_us").is_null() & (time_us > 0.0),
    )
    us = pl.col("weight") * pl.col("time_us")
    exposed = (pl.col("exposed_us") / pl.col("time_us")).clip(0.0, 1.0)
    if mean_step is None:
        exposed = pl.lit(1.0)  # nobody asks
    communication_us = step["exposed_us"] + step["hidden_us"]
    usual = step["exposed_us"] / communication_us if communication_us > 0.0 else 1.0
    lacks["steps"] = known.height - placed.height
    lacks["times"] = placed["time_us"].null_count()
    lacks["exposed"] = placed.select(exposed).to_series().null_count()
    lacks["bound"] = placed.select(us.filter("is_bound").sum() / us.sum()).fill_nan(0.0).item()
    columns = ("kind", "size_bytes", "weight", "time_us", "compute_ratio")
    versions = placed["nccl_version"].drop_nulls().unique().sort().to_list()
    return Job(
        kinds=kinds,
        calls=placed.select(*columns, exposed=exposed.fill_null(usual)),
        steps=mean_step,
        nccl_version=versions[-1] if versions else None,
        sources=placed["source"].unique().sort().to_list(),
        lacks=lacks,
        unread=[],
    )


def _known(calls: pl.DataFrame, ranks_per_node: int) -> tuple[pl.DataFrame, dict[str, float]]:
    known = with_bins(calls.drop_nulls("collective"))
    if known.is_empty():
        raise NotEnoughData(
            f"none of the {calls.height} calls of the trace names a collective and a size; record "
            "with record_shapes=True (torch.profiler), or give another trace"
        )
    says = pl.col("asks_tuner").is_not_null() | pl.col("source").is_in(["plugin", "simulator"])
    known, guessed = placed(known, ranks_per_node)
    lacks: dict[str, float] = {
        "names": calls.height - known.height,
        "asks": known.filter(~says).height,
        "nodes": guessed,
    }
    return known.with_columns(why_not=_WHY_NOT, group=pl.col("group").fill_null("")), lacks


def _mean_step(steps: pl.DataFrame) -> dict[str, float]:
    mean: dict[str, float] = steps.select(pl.col(_STEP).cast(pl.Float64).mean()).row(0, named=True)
    hidden_us = max(0.0, mean.pop("communication_us") - mean["exposed_us"])
    count, ranks = (steps.select("run", name).n_unique() for name in ("step", "source_file"))
    return {"count": count, "ranks": ranks, **mean, "hidden_us": hidden_us}


_SHAPE: Final = ("collective", "num_nodes", "ranks_per_node")
#: Tasks, the numbers of their sizes, and the actions.
_Table = tuple[Ints, Ints, Ints]
DRAWS: Final = 400
ROWS: Final = "matmul"
PRICE: Final = "sm_price"
#: Of the runs, left out in turn.
_FOLDS: Final = 3


@dataclass(frozen=True, slots=True)
class Gains:
    """What is known of one kind of calls."""

    configs: tuple[Config, ...]
    #: (D, A) ln(NCCL's own time / a config's); NaN where not known.
    draws: Floats
    #: The best table's action: NCCL's own where no gain is sure.
    best: int
    default_us: float
    #: (E, A) share of its speed that each kind of compute loses during a call; NaN where not known.
    lost: Floats | None
    #: What tells it, as in tables: ROWS beside products near this size, else PRICE.
    lost_by: str


class Measured:
    """Gains from a sweep on one system, in the default environment."""

    def __init__(
        self,
        frame: pl.DataFrame,
        system: str | None = None,
        version: str | None = None,
        sm_price: float = 0.0,
    ) -> None:
        """`version`: the job's NCCL. Raises UnknownName and UserError (system), NotEnoughData."""
        names = frame["system"].unique().sort().to_list()
        if system is None and len(names) > 1:
            raise UserError(f"{len(names)} systems; name one: --system {' or '.join(names)}")
        if system is not None and system not in names:
            raise UnknownName("system", system, names, where="--system")
        self.system = system or str(names[0])
        rows = with_trust(frame).filter(system=self.system, launch_profile=DEFAULT_PROFILE)
        refused = rows.filter(~pl.col("is_trusted"))
        held = sorted(rows["nccl_version"].drop_nulls().unique(), key=NcclVersion.parse)
        minor = NcclVersion.minor_of
        same = [each for each in held if version is None or minor(each) == minor(version)]
        #: The job's release, else the newest of its minor release, else the newest.
        self.nccl_version = version if version in same else (same or held or [None])[-1]
        rows = rows.filter(pl.col("nccl_version").eq_missing(pl.lit(self.nccl_version)))
        self._is_other_version = bool(held) and not same
        self._catalogue = Catalogue.from_frame(rows)
        self._refused = refused.with_columns(self._catalogue.actions(refused))
        rows = rows.filter("is_trusted")
        self._grid = task_grid(rows, self._catalogue, list(Split))
        if not self._grid.tasks.height:
            raise NotEnoughData(
                f"the data hold no task of {self.system} in the untouched environment, alone on "
                "its nodes, with NCCL's own choice and two configs; measure with "
                "'dynamiccl-collect run' or name other --data"
            )
        self.is_simulated = bool(self._grid.tasks["simulated"].all())
        self._ran, self._losses = _read_back(rows), losses_of(rows)
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
        collective, nodes, per_node = key = kinds.select(_SHAPE).row(0)
        tasks = self._grid.tasks.with_row_index("row").sort("size_bytes", maintain_order=True)
        tasks = tasks.join(kinds.head(1), on=_SHAPE, how="semi", maintain_order="left")
        if tasks.is_empty() or self._is_other_version:
            return [self._why_unknown(collective, nodes, count) for count in kinds["num_ranks"]]
        rows, measured = (tasks[name].to_numpy().astype(np.int64) for name in ("row", "size_bytes"))
        asked = {size: _cell(ran) for size, ran in kinds.select("size_bytes", "ran").iter_rows()}
        sizes = np.unique([*measured, *asked])
        at = np.searchsorted(sizes, measured)
        # NCCL's own choice: as read back; in the job; at both measured sizes around.
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
        # A config that is NCCL's own choice gains nothing: what was measured of it is noise.
        is_own = np.array([[o is not None and c == Config(*o) for c in configs] for o in own])
        draws = belief.draws(DRAWS, np.random.default_rng(0)) * shown[:, None, None]
        draws[:, is_own] = 0.0
        draws[:, ~belief.is_near] = np.nan
        here = dict(zip(_SHAPE, (collective, nodes, per_node), strict=True))
        for column in np.flatnonzero(np.isin(actions, self._refused.filter(**here)["action"])):
            largest = measured[self._grid.mask[rows, actions[column]]].max()
            draws[:, sizes > largest, column] = np.nan
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
                # Constant beyond the sweep's sizes.
                default_us = float(np.exp(np.interp(np.log(size), *lines)))
                losses = near(self._losses.get((collective, nodes, nodes * per_node), {}), index)
                lost, told_by = (losses_at(losses, configs)[0], ROWS) if losses else (None, "")
                if not losses and self.sm_price and self._grid.channels is not None:
                    row = rows[np.abs(lines[0] - np.log(size)).argmin()]
                    lost, _ = priced(self._grid.channels[row, actions], self.sm_price)
                    told_by = PRICE
                found.append(Gains(configs, draws[:, number], best, default_us, lost, told_by))
        return found

    def _believe(self, table: _Table, grid: Grid, left_out: Sequence[int] = ()) -> Belief:
        cells = self._grid.cells(*table, grid.log2_sizes, left_out)
        places, log_us, variance, repeats, _ = cells
        prior = prior_of(grid)
        return Belief(prior, places, log_us, doubted(prior, places, log_us, variance, repeats))

    def _shown(self, table: _Table, grid: Grid) -> Floats | None:
        """(D,) share of claimed gains, luck included, that left-out runs show; None for one run."""
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
                both = (int(row), ABSTAIN_ACTION), (int(row), int(actions[action]))
                # What it acts with need not have been measured at this very size.
                if action == ABSTAIN_ACTION or not all(cell in times for cell in both):
                    continue
                own, other = (np.log(times[cell][np.isin(runs_of[cell], fold)]) for cell in both)
                if len(own) and len(other):
                    claimed.append(float(belief.gain[size, action]))
                    found.append(float(own.mean() - other.mean()))
        if not claimed:
            return np.ones(DRAWS)
        # At most all of it, with Student's t over the claims.
        share = min(float(np.mean(found) / np.mean(claimed)), 1.0)
        spread = np.std(found, ddof=1) if len(found) > 1 else np.abs(found).max()
        drawn = np.random.default_rng(2).standard_t(max(len(found) - 1, 1), DRAWS)
        off = spread / np.sqrt(len(found)) / np.mean(claimed) * drawn
        return np.asarray(np.maximum(share + off, 0.0))


def _cell(ran: str | None) -> Cell | None:
    algorithm, _, protocol = (ran or "").partition("/")
    return (Algorithm.parse(algorithm), Protocol.parse(protocol)) if protocol else None


def _read_back(rows: pl.DataFrame) -> dict[tuple[Any, ...], Cell | None]:
    """What NCCL ran, by collective, shape and size, where all rows agree."""
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    told = rows.filter("is_default").select(*_SHAPE, "size_bytes", ran=ran).drop_nulls().unique()
    agree = told.filter(pl.len().over(*_SHAPE, "size_bytes") == 1)
    return {tuple(place): _cell(cell) for *place, cell in agree.iter_rows()}
