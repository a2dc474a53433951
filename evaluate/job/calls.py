"""A job's trace as kinds of calls, with times, and as steps.

A *kind* is a collective in one size bin of one process group: what one entry of a tuner's table
would decide. A *block* is a training step; where the trace marks none, or fewer than three, it is a
twentieth of the calls in their order. Blocks are what a trace is resampled by.

Tables with rows of several ranks hold a call of a group once for all of its ranks that were seen. A
step belongs to one rank. So a call counts in a step by the share of the traced ranks that it was
seen on, and everything here is of the mean rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np
import polars as pl

from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.cells import nodes_of
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.splits import with_bins
from dynamiccl.datasets.store import part_paths, read, read_calls
from dynamiccl.drawn_worlds import Cell, Floats
from dynamiccl.errors import MissingPath, NotEnoughData
from dynamiccl.nccl import Algorithm, Protocol

#: Steps from which on they are the blocks; without them the calls are cut into so many.
_LEAST_STEPS: Final = 3
_PARTS: Final = 20
_KIND: Final = ("collective", "bin", "num_nodes", "num_ranks", "group", "why_not")
#: Under which names the rows of traces stand; nothing is kept of them.
_NAME: Final = "trace"
_IS_TUNED: Final = pl.col("collective").is_in([collective.wire for collective in TUNED])
#: Why no tuner is asked about a call; empty: one is.
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
    #: Why no tuner is asked about such a call; empty: one is.
    why_not: str
    calls: int
    #: Algorithm and protocol that ran most; None: the trace does not say.
    ran: str | None

    @property
    def asks(self) -> bool:
        """Whether a tuner is asked about such a call."""
        return not self.why_not

    @property
    def cell(self) -> Cell | None:
        """What `ran` names."""
        algorithm, _, protocol = (self.ran or "").partition("/")
        return (Algorithm.parse(algorithm), Protocol.parse(protocol)) if protocol else None

    @property
    def shape(self) -> str:
        """Nodes x ranks a node, as far as known."""
        if self.num_nodes is None or self.num_ranks is None:
            return f"{self.num_ranks or '?'} ranks"
        return f"{self.num_nodes} x {self.num_ranks // self.num_nodes}"


@dataclass(frozen=True)
class Job:
    """A trace, C calls of K kinds in B blocks."""

    kinds: list[Kind]
    #: (C rows) `kind` and `block`, numbers of both; `weight`, the call's share of the mean rank;
    #: `time_us`, null where the trace has none; `exposed`, the share of it without compute beside.
    calls: pl.DataFrame
    #: Whether the trace has any time.
    has_times: bool
    num_blocks: int
    #: (B,) us of the step of the mean rank; None: the trace has no steps.
    step_us: Floats | None
    #: The mean step of a rank: `count` and `ranks`, and in us `step_us`, `compute_us`, `hidden_us`
    #: and `exposed_us`, which are its communication, and `idle_us`. None: not known.
    steps: dict[str, float] | None
    nccl_version: str | None
    sources: list[str]
    notes: list[str]

    def of_kind(self, values: pl.Expr) -> Floats:
        """(K,) weighted sums over the calls of each kind; null counts as 0."""
        sums = self.calls.group_by("kind").agg((values * pl.col("weight")).sum()).sort("kind")
        return sums.to_series(1).to_numpy()

    @cached_property
    def kind_us(self) -> Floats:
        """(K,) us of all calls of each kind."""
        return self.of_kind(pl.col("time_us"))

    @cached_property
    def kind_exposed_us(self) -> Floats:
        """(K,) us of it that is exposed."""
        return self.of_kind(pl.col("exposed") * pl.col("time_us"))

    @property
    def whole_us(self) -> float:
        """The time that shares are of: of the steps, or of all calls where there are none."""
        return float((self.kind_us if self.step_us is None else self.step_us).sum())

    def share_of(self, kinds: Sequence[int]) -> float:
        """The share of the whole that is exposed time of some kinds."""
        exposed_us = float(self.kind_exposed_us[list(kinds)].sum())
        return exposed_us / self.whole_us if self.whole_us > 0.0 else 0.0

    def timed(self, default_us: Floats) -> Self:
        """With a time for each call: its own, its kind's mean, the benchmark's (K,), by its bytes.

        The notes say how much of it the trace did not tell.
        """
        means = self.calls.group_by("kind").agg(pl.col("time_us").mean()).sort("kind")["time_us"]
        mean = np.where(means.is_null(), default_us, means)
        sizes, told = np.array([kind.size_bytes for kind in self.kinds]), np.isfinite(mean)
        us_per_byte = float(mean[told].sum() / sizes[told].sum()) if told.any() else 1.0
        mean = np.where(told, mean, sizes * us_per_byte)
        notes = list(self.notes)
        if missing := self.calls["time_us"].null_count():
            notes.append(
                f"{missing} calls have no time; they are taken for the mean of their kind, or for "
                "what they take in the benchmark, or by their bytes"
            )
        of_kind = pl.Series(mean[self.calls["kind"]])
        calls = self.calls.with_columns(pl.col("time_us").fill_null(of_kind))
        return replace(self, calls=calls, notes=notes)

    def placed(
        self, groups: Sequence[tuple[int, int]], measured: Sequence[tuple[int, int]]
    ) -> Self:
        """With the nodes of kinds filled in where the trace does not say; a note says so.

        By `groups` (nodes, ranks a node) that a person named, else by the one of the `measured`
        shapes that has so many ranks; where several have, the kind's stays None.
        """
        known, named = (nodes_of({(n, n * per) for n, per in each}) for each in (measured, groups))
        nodes, guessed = known | named, set[str]()
        kinds = list(self.kinds)
        for number, kind in enumerate(kinds):
            if kind.num_nodes is None and kind.num_ranks in nodes:
                kinds[number] = replace(kind, num_nodes=nodes[kind.num_ranks])
                guessed.add(f"{kind.num_ranks} on {nodes[kind.num_ranks]}")
        notes = list(self.notes)
        if guessed:
            notes.append(
                "ranks and nodes, which the trace does not say, are taken to be "
                f"{', '.join(sorted(guessed))} as measured or named"
            )
        return replace(self, kinds=kinds, notes=notes)


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
        if path.is_dir() and (part_paths(path, "calls") or any(path.glob("**/*.dcc"))):
            calls.append(read_calls(path))
            if part_paths(path, "steps"):
                steps.append(read(path, "steps"))
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
    notes, known = list[str](), with_bins(calls.drop_nulls("collective"))
    if known.height < calls.height:
        notes.append(f"{calls.height - known.height} calls name no collective or size; left out")
    if known.is_empty():
        raise NotEnoughData(
            f"none of the {calls.height} calls of the trace names a collective and a size; record "
            "with record_shapes=True (torch.profiler), or give another trace"
        )
    sure = pl.col("asks_tuner").is_not_null() | pl.col("source").is_in(["plugin", "simulator"])
    if guessed := known.height - known.filter(sure).height:
        notes.append(
            f"whether a tuner is asked is not known of {guessed} calls; those of the five "
            "collectives that NCCL has a table for are taken to ask"
        )
    if ranks_per_node is not None:
        node = pl.col("group_ranks").list.eval(pl.element() // ranks_per_node)
        nodes = node.list.n_unique().cast(pl.Int64)
        # A group that lies unevenly is of no shape that is measured.
        even = pl.when(pl.col("num_ranks") % nodes == 0).then(nodes)
        known = known.with_columns(num_nodes=pl.coalesce("num_nodes", even))
    known = known.with_columns(why_not=_WHY_NOT, group=pl.col("group").fill_null(""))
    placed, step_us, ranks = _blocks(known, steps, notes)
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    kinds = placed.group_by(_KIND, maintain_order=True).agg(
        size_bytes=pl.col("size_bytes").median().round().cast(pl.Int64),
        calls=pl.len(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    numbered = kinds.with_row_index("kind").select(*_KIND, "kind")
    placed = placed.join(numbered, on=_KIND, how="left", nulls_equal=True, maintain_order="left")
    time_us = pl.coalesce("time_us", "time_at_most_us").cast(pl.Float64)
    placed = placed.with_columns(
        pl.when(time_us > 0.0).then(time_us),
        pl.col("kind", "block").cast(pl.Int64),
        weight=(pl.col("ranks_seen") / ranks).clip(0.0, 1.0).fill_null(1.0),
        is_bound=pl.col("time_us").is_null() & (time_us > 0.0),
    )
    if placed["is_bound"].any():
        us = pl.col("weight") * pl.col("time_us")
        share = placed.select(us.filter("is_bound").sum() / us.sum()).item()
        notes.append(
            f"{share:.0%} of communication time is of a few ranks alone and may hold waiting for "
            "the others; intervals begin at the benchmark's time"
        )
    # Steps that hold none of the calls say nothing of them; then nobody asks what is exposed.
    exposed, mean_step = pl.ones(placed.height, pl.Float64, eager=True), None
    if steps is not None and step_us is not None:
        exposed, mean_step = _exposed(placed, steps, notes), _mean_step(steps, ranks)
    versions = placed["nccl_version"].drop_nulls().unique().sort().to_list()
    return Job(
        kinds=[Kind(**row) for row in kinds.to_dicts()],
        calls=placed.select("kind", "block", "weight", "time_us", exposed=exposed),
        has_times=placed["time_us"].count() > 0,
        num_blocks=placed["block"].n_unique() if step_us is None else len(step_us),
        step_us=step_us,
        steps=mean_step,
        nccl_version=versions[-1] if versions else None,
        sources=placed["source"].unique().sort().to_list(),
        notes=notes,
    )


def _blocks(
    calls: pl.DataFrame, steps: pl.DataFrame | None, notes: list[str]
) -> tuple[pl.DataFrame, Floats | None, int]:
    """With `block`; the time of each block's step where there are steps; and the ranks traced."""
    if steps is not None and steps.height:
        ranks = steps.select("run", "source_file").n_unique()
        means = steps.group_by("run", "step").agg(pl.col("step_us").mean()).sort("run", "step")
        means = means.with_row_index("block")
        blocks = means.select("run", "step", "block")
        inside = calls.join(blocks, on=["run", "step"], how="inner", maintain_order="left")
        if inside.height and means["step_us"].null_count() == 0:
            if inside.height < calls.height:
                notes.append(f"{calls.height - inside.height} calls lie in no step; left out")
            return inside, means["step_us"].to_numpy(), ranks
    if calls["step"].drop_nulls().n_unique() >= _LEAST_STEPS:
        rank = pl.struct("run", "step").rank("dense") - 1
        return calls.drop_nulls("step").with_columns(block=rank), None, 1
    order = [name for name in ("run", "timestamp", "sequence") if calls[name].null_count() == 0]
    size = max(1, calls.height // _PARTS)
    part = (pl.int_range(pl.len()) // size).clip(0, calls.height // size - 1)
    return calls.sort(order, maintain_order=True).with_columns(block=part), None, 1


def _exposed(calls: pl.DataFrame, steps: pl.DataFrame, notes: list[str]) -> pl.Series:
    """(C,) share of each call beside which no compute ran; where missing, the average by steps."""
    exposed_us, whole_us = float(steps["exposed_us"].sum()), float(steps["communication_us"].sum())
    share = exposed_us / whole_us if whole_us > 0.0 else 1.0
    own = calls.select((pl.col("exposed_us") / pl.col("time_us")).clip(0.0, 1.0)).to_series()
    if missing := own.null_count():
        notes.append(
            f"how much of {missing} calls compute hid is not known; it is taken to be "
            f"{1.0 - share:.0%}, as of all communication"
        )
    return own.fill_null(share)


def _mean_step(steps: pl.DataFrame, ranks: int) -> dict[str, float] | None:
    parts = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
    if any(steps[name].null_count() for name in parts):
        return None
    mean: dict[str, float] = steps.select(pl.col(parts).cast(pl.Float64).mean()).row(0, named=True)
    hidden_us = max(0.0, mean.pop("communication_us") - mean["exposed_us"])
    count = steps.select("run", "step").n_unique()
    return {"count": count, "ranks": ranks, **mean, "hidden_us": hidden_us}
