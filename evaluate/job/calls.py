"""A job's trace as kinds of calls, with times, and as steps.

A *kind* is a collective in one size bin of one process group: what one entry of a tuner's table
would decide. A *block* is a training step; where the trace marks none, it is a twentieth of the
calls in their order. Blocks are what a trace is resampled by.

Tables with rows of several ranks hold a call of a group once for all of its ranks that were seen. A
step belongs to one rank. So a call counts in a step by the share of the traced ranks that it was
seen on, and everything here is of the mean rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

import polars as pl

from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.cells import nodes_of
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.splits import with_bins
from dynamiccl.datasets.store import part_paths, read, read_calls
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import MissingPath, NotEnoughData

#: Blocks of a trace without steps.
_PARTS: Final = 20
_KIND: Final = ("collective", "bin", "num_nodes", "num_ranks", "group", "why_not")
_STEP: Final = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
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
class Job:
    """A trace, C calls of K kinds in B blocks."""

    #: (K rows) `collective`, `bin`, `num_nodes` and `num_ranks` (null: not told), process `group`
    #: (empty: not told), `why_not` a tuner is asked about such calls (empty: one is); `size_bytes`,
    #: the median; `calls`, how many; `ran`, the algorithm/protocol that ran most (null: not told).
    #: Once `timed`, of the mean rank the sums `time_us` and `exposed_us`, and `mean_us` a call.
    kinds: pl.DataFrame
    #: (C rows) `kind` and `block`, numbers of both; `weight`, the call's share of the mean rank;
    #: `time_us`, null where the trace has none; `exposed`, the share of it without compute beside;
    #: `compute_ratio`, as the trace tells it.
    calls: pl.DataFrame
    #: Whether the trace has any time.
    has_times: bool
    #: (B,) us of the step of the mean rank; None: the trace has no steps.
    step_us: Floats | None
    #: The mean step of a rank: `count` and `ranks`, and in us `step_us`, `compute_us`, `hidden_us`
    #: and `exposed_us`, which are its communication, and `idle_us`. None without steps.
    steps: dict[str, float] | None
    nccl_version: str | None
    sources: list[str]
    notes: list[str]

    @property
    def whole_us(self) -> float:
        """The time that shares are of: of the steps, or of all calls where there are none."""
        return float((self.kinds["time_us"] if self.step_us is None else self.step_us).sum())

    def share_of(self, kinds: pl.Expr | list[int]) -> float:
        """The share of the whole that is exposed time of some kinds, by a condition or numbers."""
        us = self.kinds["exposed_us"]
        us = us.gather(kinds) if isinstance(kinds, list) else self.kinds.filter(kinds)["exposed_us"]
        return float(us.sum()) / self.whole_us if self.whole_us > 0.0 else 0.0

    def placed(
        self, groups: Sequence[tuple[int, int]], measured: Sequence[tuple[int, int]]
    ) -> Self:
        """With the nodes of kinds filled in where the trace does not say; a note says so.

        By `groups` (nodes, ranks a node) that a person named, else by the one of the `measured`
        shapes that has so many ranks; where several have, the kind's stays null.
        """
        known, named = (nodes_of({(n, n * per) for n, per in each}) for each in (measured, groups))
        nodes = pl.col("num_ranks").replace_strict(
            known | named, default=None, return_dtype=pl.Int64
        )
        is_told = pl.col("num_nodes").is_not_null()
        texts = self.kinds.filter(~is_told).select(pl.format("{} on {}", "num_ranks", nodes))
        notes = [
            "ranks and nodes, which the trace does not say, are taken to be "
            f"{', '.join(texts.to_series().drop_nulls().unique().sort())} as measured or named"
        ]
        kinds = self.kinds.with_columns(pl.coalesce("num_nodes", nodes))
        is_guessed = kinds["num_nodes"].null_count() < self.kinds["num_nodes"].null_count()
        return replace(self, kinds=kinds, notes=[*self.notes, *(notes if is_guessed else [])])

    def timed(self, default_us: Floats) -> Self:
        """With a time for each call: its own, its kind's mean, the benchmark's (K,), by its bytes.

        The notes say how much of it the trace did not tell.
        """
        means = self.calls.group_by("kind").agg(us=pl.col("time_us").mean())
        numbered = self.kinds.with_row_index("kind").join(means, on="kind", how="left")
        numbered = numbered.sort("kind").with_columns(
            pl.coalesce("us", pl.Series(default_us).fill_nan(None))
        )
        told = numbered.drop_nulls("us")
        us_per_byte = (
            float(told["us"].sum()) / int(told["size_bytes"].sum()) if told.height else 1.0
        )
        of_kind = numbered["us"].fill_null(numbered["size_bytes"] * us_per_byte)
        calls = self.calls.with_columns(
            pl.col("time_us").fill_null(of_kind.gather(self.calls["kind"]))
        )
        us = pl.col("time_us") * pl.col("weight")
        sums = calls.group_by("kind").agg(
            time_us=us.sum(),
            exposed_us=(us * pl.col("exposed")).sum(),
            mean_us=us.sum() / pl.col("weight").sum(),
        )
        notes = list(self.notes)
        if missing := self.calls["time_us"].null_count():
            notes.append(
                f"{missing} calls have no time; they are taken for the mean of their kind, or for "
                "what they take in the benchmark, or by their bytes"
            )
        kinds = self.kinds.with_columns(sums.sort("kind").drop("kind"))
        return replace(self, kinds=kinds, calls=calls, notes=notes)


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
    # A step of which parts are not known is of a rank whose GPU was not traced.
    steps = None if steps is None else steps.drop_nulls(_STEP)
    placed, step_us = _blocks(known, steps)
    if placed.height < known.height:
        notes.append(f"{known.height - placed.height} calls lie in no step; left out")
    ran = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    kinds = placed.group_by(_KIND, maintain_order=True).agg(
        size_bytes=pl.col("size_bytes").median().round().cast(pl.Int64),
        calls=pl.len(),
        ran=ran.drop_nulls().mode().sort().first(),
    )
    numbered = kinds.with_row_index("kind").select(*_KIND, "kind")
    placed = placed.join(numbered, on=_KIND, how="left", nulls_equal=True, maintain_order="left")
    mean_step = None if steps is None or step_us is None else _mean_step(steps)
    ranks = 1 if mean_step is None else mean_step["ranks"]
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
    # Without steps nobody asks what is exposed.
    exposed = pl.ones(placed.height, pl.Float64, eager=True)
    if mean_step is not None:
        exposed = _exposed(placed, mean_step, notes)
    versions = placed["nccl_version"].drop_nulls().unique().sort().to_list()
    return Job(
        kinds=kinds,
        calls=placed.select("kind", "block", "weight", "time_us", "compute_ratio", exposed=exposed),
        has_times=placed["time_us"].count() > 0,
        step_us=step_us,
        steps=mean_step,
        nccl_version=versions[-1] if versions else None,
        sources=placed["source"].unique().sort().to_list(),
        notes=notes,
    )


def _blocks(calls: pl.DataFrame, steps: pl.DataFrame | None) -> tuple[pl.DataFrame, Floats | None]:
    """Calls with `block`, and the time of each block's step where calls lie in steps."""
    if steps is not None:
        means = steps.group_by("run", "step").agg(us=pl.col("step_us").mean()).sort("run", "step")
        blocks = means.with_row_index("block").drop("us")
        inside = calls.join(blocks, on=["run", "step"], maintain_order="left")
        if inside.height:
            return inside, means["us"].to_numpy()
    order = [name for name in ("run", "timestamp", "sequence") if calls[name].null_count() == 0]
    size = max(1, calls.height // _PARTS)
    part = (pl.int_range(pl.len()) // size).clip(0, calls.height // size - 1)
    return calls.sort(order, maintain_order=True).with_columns(block=part), None


def _exposed(calls: pl.DataFrame, step: dict[str, float], notes: list[str]) -> pl.Series:
    """(C,) share of each call beside which no compute ran; where missing, the average by steps."""
    whole_us = step["exposed_us"] + step["hidden_us"]
    share = step["exposed_us"] / whole_us if whole_us > 0.0 else 1.0
    own = calls.select((pl.col("exposed_us") / pl.col("time_us")).clip(0.0, 1.0)).to_series()
    if missing := own.null_count():
        notes.append(
            f"how much of {missing} calls compute hid is not known; it is taken to be "
            f"{1.0 - share:.0%}, as of all communication"
        )
    return own.fill_null(share)


def _mean_step(steps: pl.DataFrame) -> dict[str, float]:
    mean: dict[str, float] = steps.select(pl.col(_STEP).cast(pl.Float64).mean()).row(0, named=True)
    hidden_us = max(0.0, mean.pop("communication_us") - mean["exposed_us"])
    count, ranks = (steps.select("run", name).n_unique() for name in ("step", "source_file"))
    return {"count": count, "ranks": ranks, **mean, "hidden_us": hidden_us}
