"""A job's trace as kinds of calls, with times, and as steps.

A *kind* is a collective in one size bin of one process group: what one entry of a tuner's table
would decide.

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
from dynamiccl.datasets.cells import placed
from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.splits import with_bins
from dynamiccl.datasets.store import part_paths, read, read_calls
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import MissingPath, NotEnoughData

_KIND: Final = ("collective", "bin", "num_nodes", "num_ranks", "group", "why_not")
_STEP: Final = ("step_us", "compute_us", "communication_us", "exposed_us", "idle_us")
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
    """A trace, C calls of K kinds."""

    #: (K rows) `kind`, its number; `collective`, `bin`, `num_nodes`, `num_ranks` and `group` (null
    #: or empty: not told); `why_not` a tuner is asked about such calls (empty: one is);
    #: `size_bytes`, the median; `calls`, how many; `ran`, the algorithm/protocol that ran most.
    #: Once `timed`, of the mean rank the sums `time_us` and `exposed_us`, and `mean_us` a call.
    kinds: pl.DataFrame
    #: (C rows) `kind`; `size_bytes`; `weight`, the call's share of the mean rank; `time_us`, null
    #: where the trace has none; `exposed`, the share of it without compute beside;
    #: `compute_ratio`, as the trace tells it.
    calls: pl.DataFrame
    #: The mean step of a rank: `count` and `ranks`, and in us `step_us`, `compute_us`, `hidden_us`
    #: and `exposed_us`, which are its communication, and `idle_us`. None without steps.
    steps: dict[str, float] | None
    nccl_version: str | None
    sources: list[str]
    #: What the trace does not tell, as numbers of calls, and as the share of communication that is
    #: `bound`; and why some of its files were not read (job.words.jinja says it).
    lacks: dict[str, float]
    unread: list[str]

    @property
    def has_times(self) -> bool:
        """Whether the trace tells the time of any call."""
        return self.lacks["times"] < self.calls.height

    @property
    def whole_us(self) -> float:
        """The time that shares are of: of the steps, or of all calls where there are none."""
        if self.steps is None:
            return float(self.kinds["time_us"].sum())
        return self.steps["step_us"] * self.steps["count"]

    def share_of(self, kinds: list[int]) -> float:
        """The share of the whole that is exposed time of some kinds, by their numbers."""
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
    """The job of which the traces are.

    A directory with a `calls` table is read as such; all else as `dynamiccl-collect import` does.
    Raises MissingPath, and as `job_of` and the readers.
    """
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
        # Nothing is kept of the names.
        traces = read_traces(files, system="trace", sweep="trace")
        if traces.errors and not traces.calls.num_rows and not traces.steps.num_rows:
            raise traces.errors[0]
        calls.append(pl.DataFrame(traces.calls))
        steps.append(pl.DataFrame(traces.steps))
        unread = [str(error) for error in traces.errors]
    job = job_of(pl.concat(calls), pl.concat(steps) if steps else None, ranks_per_node)
    return replace(job, unread=unread)


def job_of(calls: pl.DataFrame, steps: pl.DataFrame | None, ranks_per_node: int) -> Job:
    """The job of the tables `calls` and `steps`, in the schema's columns.

    Process groups lie by `ranks_per_node` as in `placed`. Raises NotEnoughData where no row names a
    collective and a size.
    """
    known, lacks = _known(calls, ranks_per_node)
    placed, mean_step = known, None
    if steps is not None:
        # A step of which parts are not known is of a rank whose GPU was not traced.
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
    """Calls of a known collective and size, with all of _KIND; and what is guessed of them."""
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
