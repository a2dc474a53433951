"""A job's trace as kinds of calls, with times, and as steps.

A *kind* is a collective in one size bin of one process group: what one entry of a tuner's table
would decide. A *block* is a training step; where the trace marks none, or fewer than three, it is a
twentieth of the calls in their order. Blocks are what a trace is resampled by.

Tables with rows of several ranks hold a call of a group once for all of its ranks that were seen. A
step belongs to one rank. So a call counts in a step by the share of the traced ranks that it was
seen on, and everything here is of the mean rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np
import polars as pl

from dynamiccl.belief import Bools
from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.drawn_worlds import Cell, Floats, Ints
from dynamiccl.errors import MissingPath, NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.sizes import size_bin

#: Steps from which on they are the blocks; without them the calls are cut into so many.
_LEAST_STEPS: Final = 3
_PARTS: Final = 20
_KIND: Final = ("collective", "bin", "num_nodes", "num_ranks", "group", "asks", "why_not")
_TEXT: Final = pl.String
#: Under which names the rows of traces stand; nothing is kept of them.
_NAME: Final = "trace"


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that share one entry of a decision table."""

    collective: str
    bin: int
    #: The median of its calls.
    size_bytes: int
    num_ranks: int | None
    #: None: the trace does not say.
    num_nodes: int | None
    #: The process group's name; empty where the trace has none.
    group: str
    #: Whether a tuner is asked about such a call; `why_not` says what it is where none is.
    asks: bool
    why_not: str
    calls: int
    #: Algorithm and protocol that ran most; None: the trace does not say.
    ran: str | None

    @property
    def cell(self) -> Cell | None:
        """What `ran` names."""
        algorithm, _, protocol = (self.ran or "").partition("/")
        return (Algorithm.parse(algorithm), Protocol.parse(protocol)) if protocol else None


@dataclass(frozen=True, slots=True)
class Steps:
    """The mean step of a rank, us; communication is `hidden_us` + `exposed_us`."""

    count: int
    ranks: int
    step_us: float
    compute_us: float
    hidden_us: float
    exposed_us: float
    idle_us: float


@dataclass(frozen=True)
class Job:
    """A trace, C calls of K kinds in B blocks."""

    kinds: list[Kind]
    #: (C,) of each call: its kind, its block, its share of the mean rank.
    kind: Ints
    block: Ints
    weight: Floats
    #: (C,) us; NaN where the trace has no time. Where `is_bound`, waiting for other ranks is in it.
    time_us: Floats
    is_bound: Bools
    #: Whether the trace has any time.
    has_times: bool
    #: (C,) us in which no compute ran beside the call; None: the trace does not tell.
    exposed_us: Floats | None
    #: (B,) us of the step of the mean rank; None: the trace has no steps.
    step_us: Floats | None
    steps: Steps | None
    num_blocks: int
    nccl_version: str | None
    sources: list[str]
    notes: list[str] = field(default_factory=list)

    def of_kind(self, values: Floats) -> Floats:
        """(K,) weighted sums over the calls of each kind; NaN counts as 0."""
        filled = np.nan_to_num(values) * self.weight
        return np.bincount(self.kind, filled, minlength=len(self.kinds)).astype(np.float64)

    @cached_property
    def kind_us(self) -> Floats:
        """(K,) us of all calls of each kind."""
        return self.of_kind(self.time_us)

    @cached_property
    def kind_exposed_us(self) -> Floats:
        """(K,) us of it that is exposed; all where the trace does not tell."""
        return self.kind_us if self.exposed_us is None else self.of_kind(self.exposed_us)

    @property
    def mean_us(self) -> Floats:
        """(K,) mean time of a call, us."""
        found: Floats = self.kind_us / np.maximum(self.of_kind(np.ones(len(self.kind))), 1e-12)
        return found

    @property
    def whole_us(self) -> float:
        """The time that shares are of: of the steps, or of all calls where there are none."""
        return float((self.kind_us if self.step_us is None else self.step_us).sum())

    def share_of(self, kinds: Sequence[int]) -> float:
        """The share of the whole that is exposed time of some kinds."""
        part = self.kind_us if self.step_us is None else self.kind_exposed_us
        return float(part[list(kinds)].sum()) / self.whole_us if self.whole_us > 0.0 else 0.0

    def timed(self, default_us: Floats) -> Self:
        """With a time for each call: its own, its kind's mean, the benchmark's (K,), by its bytes.

        The notes say how much of it the trace did not tell.
        """
        known, sizes = np.isfinite(self.time_us), np.array([k.size_bytes for k in self.kinds])
        count = np.bincount(self.kind[known], minlength=len(self.kinds))
        total = np.bincount(self.kind[known], self.time_us[known], minlength=len(self.kinds))
        mean = np.where(count > 0, total / np.maximum(count, 1), default_us)
        told = np.isfinite(mean)
        us_per_byte = float(mean[told].sum() / sizes[told].sum()) if told.any() else 1.0
        mean = np.where(told, mean, sizes * us_per_byte)
        notes = list(self.notes)
        if not self.has_times:
            notes.append(
                "the trace has no times: its calls are weighed by what they take in the benchmark, "
                "and by their bytes where that is not known"
            )
        elif not known.all():
            missing = int((~known).sum())
            notes.append(f"{missing} calls have no time; they are taken for the mean of their kind")
        found = replace(self, time_us=np.where(known, self.time_us, mean[self.kind]), notes=notes)
        bound = float(found.of_kind(np.where(self.is_bound, found.time_us, 0.0)).sum())
        if bound > 0.0:
            notes.append(
                f"{bound / found.kind_us.sum():.0%} of communication time is of a few ranks alone "
                "and may hold waiting for the others; intervals begin at the benchmark's time"
            )
        return found


def read_job(paths: Sequence[Path], ranks_per_node: int | None) -> Job:
    """The job of which the traces are.

    A directory with a `calls` table is read as such; all else by its content, as
    `dynamiccl-collect import` does. Raises MissingPath, UserError, what `job_of` and the readers
    raise.
    """
    calls, steps, files, notes = list[pl.DataFrame](), list[pl.DataFrame](), [], []
    for path in paths:
        if not path.exists():
            raise MissingPath("trace", path, "name a trace, or a directory of them or of data")
        if path.is_dir() and part_paths(path, "calls"):
            calls.append(read(path, "calls"))
            if part_paths(path, "steps"):
                steps.append(read(path, "steps"))
        elif path.is_dir() and any(path.glob("**/*.dcc")):
            raise UserError(
                f"{path} holds what the plugin wrote; read it in first: dynamiccl-collect import "
                f"{path} --out DATA --system NAME, and give DATA"
            )
        else:
            files.append(path)
    if files:
        traces = read_traces(files, system=_NAME, sweep=_NAME)
        if traces.errors and not traces.calls.num_rows and not traces.steps.num_rows:
            raise traces.errors[0]
        calls.append(pl.DataFrame(traces.calls))
        steps.append(pl.DataFrame(traces.steps))
        notes = [f"not read: {error}" for error in traces.errors]
    job = job_of(pl.concat(calls), pl.concat(steps) if steps else None, ranks_per_node)
    job.notes.extend(notes)
    return job


def job_of(
    calls: pl.DataFrame, steps: pl.DataFrame | None, ranks_per_node: int | None = None
) -> Job:
    """The job of the tables `calls` and `steps`, in the schema's columns.

    `ranks_per_node` places the ranks of process groups node by node, where the trace names them and
    does not say on how many nodes they are. Raises NotEnoughData where no row names a collective
    and a size.
    """
    notes: list[str] = []
    known = calls.filter(
        pl.col("collective").is_not_null() & pl.col("size_bytes").is_not_null()
    ).filter(pl.col("size_bytes") > 0)
    if known.height < calls.height:
        notes.append(f"{calls.height - known.height} calls name no collective or size; left out")
    if known.is_empty():
        raise NotEnoughData(
            f"none of the {calls.height} calls of the trace names a collective and a size; record "
            "with record_shapes=True (torch.profiler), or give another trace"
        )
    known = _asking(known, notes)
    if ranks_per_node is not None:
        known = _placed(known, ranks_per_node)
    sized = known.with_columns(
        bin=pl.col("size_bytes").replace_strict(_bins(known), return_dtype=pl.Int64),
        group=pl.col("group").fill_null(""),
    )
    steps = None if steps is None or steps.is_empty() else steps
    placed, step_us, ranks = _blocks(sized, steps, notes)
    # Steps that hold none of the calls say nothing of them.
    steps = None if step_us is None else steps
    kinds = placed.group_by(_KIND, maintain_order=True).agg(
        size_bytes=pl.col("size_bytes").median().round().cast(pl.Int64),
        calls=pl.len(),
        ran=pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
        .drop_nulls()
        .mode()
        .sort()
        .first(),
    )
    numbered = kinds.with_row_index("kind").select(*_KIND, "kind")
    placed = placed.join(
        numbered, on=list(_KIND), how="left", nulls_equal=True, maintain_order="left"
    )
    time, bound = _times(placed)
    weight = np.ones(placed.height)
    if ranks > 1:
        weight = np.minimum(placed["ranks_seen"].to_numpy().astype(np.float64) / ranks, 1.0)
    exposed = _exposed(placed, time, steps, notes)
    versions = placed["nccl_version"].drop_nulls().unique().sort().to_list()
    return Job(
        kinds=[Kind(**row) for row in kinds.to_dicts()],
        kind=placed["kind"].to_numpy().astype(np.int64),
        block=placed["block"].to_numpy().astype(np.int64),
        weight=weight,
        time_us=time,
        is_bound=bound,
        has_times=bool(np.isfinite(time).any()),
        exposed_us=exposed,
        step_us=step_us,
        steps=None if steps is None else _mean_step(steps, ranks),
        num_blocks=int(str(placed["block"].max())) + 1 if step_us is None else len(step_us),
        nccl_version=versions[-1] if versions else None,
        sources=placed["source"].unique().sort().to_list(),
        notes=notes,
    )


def _bins(calls: pl.DataFrame) -> dict[int, int]:
    """Size -> its bin, computed once for each distinct size."""
    return {size: size_bin(size) for size in calls["size_bytes"].unique()}


def _placed(calls: pl.DataFrame, ranks_per_node: int) -> pl.DataFrame:
    """Add the number of nodes for groups with listed ranks, `ranks_per_node` on each in order."""
    node = pl.col("group_ranks").list.eval(pl.element() // ranks_per_node)
    nodes = node.list.n_unique().cast(pl.Int64)
    # A group that lies unevenly is of no shape that is measured.
    even = pl.when(pl.col("num_ranks") % nodes == 0).then(nodes)
    return calls.with_columns(num_nodes=pl.coalesce("num_nodes", even))


def _asking(calls: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Add `asks` (whether NCCL asks a tuner) and `why_not`."""
    columns = ["collective", "asks_tuner", "num_ranks", "kernel", "decided"]
    distinct = calls.select(columns).unique(maintain_order=True)
    told = [_asks(*key) for key in distinct.iter_rows()]
    distinct = distinct.with_columns(
        pl.Series("named", [each[0] for each in told], dtype=_TEXT),
        pl.Series("asks", [each[1] for each in told], dtype=pl.Boolean),
        pl.Series("why_not", [each[2] for each in told], dtype=_TEXT),
    )
    guessed = calls.filter(pl.col("asks_tuner").is_null())
    guessed = guessed.filter(pl.col("source").is_in(["plugin", "simulator"]).not_())
    if guessed.height:
        notes.append(
            f"whether a tuner is asked is not known of {guessed.height} calls; those of the five "
            "collectives that NCCL has a table for are taken to ask"
        )
    joined = calls.join(distinct, on=columns, how="left", nulls_equal=True, maintain_order="left")
    return joined.with_columns(collective="named").drop("named")


def _asks(
    collective: str, asks: bool | None, ranks: int | None, kernel: str | None, ours: bool | None
) -> tuple[str, bool, str]:
    """NCCL's name of the collective, whether it asks a tuner, and why it does not."""
    try:
        named = Collective.parse(collective)
    except UnknownName:
        return collective, False, "not a collective of NCCL's"
    if ranks == 1:
        return named.wire, False, "one rank"
    if not named.tunable:
        return named.wire, False, "NCCL asks no tuner about it"
    if asks is False:
        return named.wire, False, f"kernel {kernel}" if kernel else "another library's or path"
    if ours:
        return named.wire, False, "a table of ours decided it already"
    return named.wire, True, ""


def _blocks(
    calls: pl.DataFrame, steps: pl.DataFrame | None, notes: list[str]
) -> tuple[pl.DataFrame, Floats | None, int]:
    """With `block`; the time of each block's step where there are steps; and the ranks traced."""
    if steps is not None:
        ranks = max(1, steps.select("run", "source_file").unique().height)
        means = steps.group_by("run", "step").agg(pl.col("step_us").mean()).sort("run", "step")
        means = means.with_row_index("block")
        inside = calls.join(
            means.select("run", "step", "block"),
            on=["run", "step"],
            how="inner",
            maintain_order="left",
        )
        if inside.height and means["step_us"].null_count() == 0:
            if inside.height < calls.height:
                notes.append(f"{calls.height - inside.height} calls lie in no step; left out")
            return inside, means["step_us"].to_numpy().astype(np.float64), ranks
    if calls["step"].drop_nulls().n_unique() >= _LEAST_STEPS:
        numbered = calls.filter(pl.col("step").is_not_null())
        rank = pl.struct("run", "step").rank("dense").cast(pl.Int64) - 1
        return numbered.with_columns(block=rank), None, 1
    order = [name for name in ("run", "timestamp", "sequence") if calls[name].null_count() == 0]
    ordered = calls.sort(order, maintain_order=True).with_row_index("place")
    size = max(1, ordered.height // _PARTS)
    last = max(0, ordered.height // size - 1)
    part = (pl.col("place") // size).clip(0, last)
    return ordered.with_columns(block=part.cast(pl.Int64)), None, 1


def _times(calls: pl.DataFrame) -> tuple[Floats, Bools]:
    bound = calls["time_us"].is_null() & calls["time_at_most_us"].is_not_null()
    time = calls.select(pl.coalesce("time_us", "time_at_most_us").cast(pl.Float64)).to_series()
    found = time.fill_null(np.nan).to_numpy().astype(np.float64)
    return np.where(found > 0.0, found, np.nan), bound.to_numpy()


def _exposed(
    calls: pl.DataFrame, time_us: Floats, steps: pl.DataFrame | None, notes: list[str]
) -> Floats | None:
    """(C,) exposed time of each call, us; where missing, the average by steps."""
    own = calls["exposed_us"].cast(pl.Float64).fill_null(np.nan).to_numpy().astype(np.float64)
    if steps is None and not np.isfinite(own).any():
        return None
    missing = ~np.isfinite(own)
    if missing.any():
        share = 1.0
        if steps is not None:
            whole = float(steps["communication_us"].sum())
            share = float(steps["exposed_us"].sum()) / whole if whole > 0.0 else 1.0
        own = np.where(missing, share * time_us, own)
        notes.append(
            f"how much of {int(missing.sum())} calls compute hid is not known; it is taken to be "
            f"{1.0 - share:.0%}, as of all communication"
        )
    clipped: Floats = np.clip(own, 0.0, np.where(np.isfinite(time_us), time_us, 0.0))
    return clipped


def _mean_step(steps: pl.DataFrame, ranks: int) -> Steps | None:
    parts = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
    if any(steps[name].null_count() for name in parts):
        return None
    step, compute, communication, exposed, idle = (float(steps[p].mean() or 0.0) for p in parts)  # type: ignore[arg-type]
    count = steps.select("run", "step").unique().height
    return Steps(count, ranks, step, compute, max(0.0, communication - exposed), exposed, idle)


def with_nodes(
    job: Job, groups: Sequence[tuple[int, int]], measured: Sequence[tuple[int, int]]
) -> Job:
    """With the nodes of kinds filled in where the trace does not say; a note says so.

    By `groups` (nodes, ranks a node) that a person named, else by the one of the `measured` shapes
    that has so many ranks; where several have, the kind's stays None.
    """
    kinds, guessed = list[Kind](), set[str]()
    for kind in job.kinds:
        if kind.num_nodes is None and kind.num_ranks is not None:
            named, known = (
                {nodes for nodes, per_node in shapes if nodes * per_node == kind.num_ranks}
                for shapes in (groups, measured)
            )
            fitting = named or known
            if len(fitting) == 1:
                kind = replace(kind, num_nodes=fitting.pop())  # noqa: PLW2901
                guessed.add(f"{kind.num_ranks} on {kind.num_nodes}")
        kinds.append(kind)
    notes = list(job.notes)
    if guessed:
        notes.append(
            f"ranks and nodes, which the trace does not say, are taken to be "
            f"{', '.join(sorted(guessed))} as measured or named"
        )
    return replace(job, kinds=kinds, notes=notes)
