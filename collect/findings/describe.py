"""Summary of a data set: systems, sizes, configs, repeats, coverage, verified share, noise."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.collect.findings.nic_ports import lossy_ports
from dynamiccl.collect.findings.slow_ranks import waited_for
from dynamiccl.datasets.cells import (
    CONFIG_COLUMNS,
    REPEAT_COLUMNS,
    left_out,
    left_out_text,
    noise_bands,
    quiet,
    tuned,
    usable,
)
from dynamiccl.datasets.schema import TASK_COLUMNS, Source, Status
from dynamiccl.datasets.store import part_paths, read, scan

#: A group of which NCCL's own log tells.
_GROUP: Final = ("system", "nccl_version", "num_nodes", "ranks_per_node", "launch_profile")


@dataclass(frozen=True, slots=True)
class SystemSummary:
    """One system of a data set; `noise_*` are unitless spreads between independent repeats."""

    system: str
    source: str
    simulated: bool
    gpu: str
    shapes: list[str]
    collectives: list[str]
    rows: int
    rows_with_time: int
    rows_by_status: dict[str, int]
    #: Rows with a time that nothing uses, by the column that says why: the GPUs were unwell.
    rows_left_out: dict[str, int]
    min_size_bytes: int
    max_size_bytes: int
    num_sizes: int
    num_configs: int
    tasks: int
    tasks_with_default: int
    tasks_with_two_forced: int
    tasks_scorable: int
    cells_repeated: int
    verified_share: float
    noise_band: float | None
    noise_median: float | None
    #: Which rank the others wait for, where times of single processes say so.
    waited_for: str | None
    #: NIC ports that lose packets again and again, where samplers read their counters.
    lossy_nics: list[str]


def describe(directory: Path) -> list[SystemSummary]:
    """Summarise every system of a data set; raises what `datasets.store.read` raises."""
    frame = read(directory)
    # The band of what a tuner decides, as in reports; of all rows where that is nothing.
    bands = {
        name: (band, median)
        for rows in (quiet(frame), quiet(tuned(frame)))
        for name, band, median in noise_bands(rows).iter_rows()
    }
    return [
        _summarise(part, bands.get(str(key[0])))
        for key, part in frame.group_by("system", maintain_order=True)
    ]


@dataclass(frozen=True, slots=True)
class CallsSummary:
    """What the deployed plugin, or a trace of another tool, recorded on one system."""

    system: str
    calls: int
    #: Calls whose time is known from all ranks.
    calls_timed: int
    #: Communicators that a call names; traces of PyTorch do not.
    communicators: int
    #: What recorded them, of `CallSource`.
    sources: list[str]


def describe_calls(directory: Path) -> list[CallsSummary]:
    """Count the recorded calls of every system; [] for none. Raises as `store.scan`."""
    if not part_paths(directory, "calls"):
        return []
    per_system = (
        scan(directory, "calls")
        .group_by("system")
        .agg(
            calls=pl.len(),
            calls_timed=pl.col("time_us").count(),
            communicators=pl.col("comm").drop_nulls().n_unique(),
            sources=pl.col("source").unique().sort(),
        )
    )
    return [CallsSummary(*row) for row in per_system.sort("system").collect().iter_rows()]


def describe_logged(directory: Path) -> list[str]:
    """Lines of text on NCCL's logged costs and decisions, and on the steps of traces.

    Raises what `store.scan` does.
    """
    return [*_costs(directory), *_decisions(directory), *_steps(directory)]


def _steps(directory: Path) -> list[str]:
    if not part_paths(directory, "steps"):
        return []
    total = {name: pl.col(f"{name}_us").sum() for name in ("communication", "exposed")}
    traced = pl.col("step_us").filter(pl.col("communication_us").is_not_null()).sum()
    per_job = (
        scan(directory, "steps")
        .group_by("system", "sweep", "run")
        .agg(
            pl.len(), pl.col("rank").n_unique(), pl.col("step_us").median(), traced=traced, **total
        )
    )
    lines = []
    for row in per_job.sort("system", "sweep", "run").collect().iter_rows():
        system, sweep, run, steps, ranks, median_us, seconds, communication, exposed = row
        shares = (
            f"{communication / seconds:.0%} of it communication, {exposed / seconds:.0%} exposed"
            if seconds
            else "its GPUs not traced"
        )
        lines.append(
            f"{system}: {steps} steps of {ranks} ranks in {sweep} ({run}), half of them within "
            f"{median_us / 1e3:.1f} ms; {shares}"
        )
    return lines


def _costs(directory: Path) -> list[str]:
    if not part_paths(directory, "costs"):
        return []
    taken = pl.col("bandwidth_gbytes_per_s") > 0
    found = scan(directory, "costs").group_by(_GROUP).agg(pl.len(), taken.sum().alias("taken"))
    return [
        f"{system}: NCCL {version or '?'}'s own cost model of {nodes or '?'}x{ranks or '?'} "
        f"({profile}): {cells} cells, of which it takes {count}"
        for system, version, nodes, ranks, profile, cells, count in found.sort(_GROUP)
        .collect()
        .iter_rows()
    ]


def _decisions(directory: Path) -> list[str]:
    if not part_paths(directory, "decisions"):
        return []
    counts = pl.col("collective").n_unique()
    found = scan(directory, "decisions").group_by(_GROUP).agg(pl.len(), counts)
    return [
        f"{system}: what NCCL {version or '?'} ran on {nodes or '?'}x{ranks or '?'} ({profile}), "
        f"of {sizes} sizes of {collectives} collectives"
        for system, version, nodes, ranks, profile, sizes, collectives in found.sort(_GROUP)
        .collect()
        .iter_rows()
    ]


def has_measurements(directory: Path, others: Sequence[object]) -> bool:
    """Whether there is more than the `others` to describe; `describe` refuses an empty store."""
    return not others or bool(part_paths(directory))


def calls_line(summary: CallsSummary) -> str:
    """One system's calls in a line of text."""
    return (
        f"{summary.system}: {summary.calls} calls of {summary.communicators} communicators, "
        f"{summary.calls_timed} with a time from all ranks ({', '.join(summary.sources)})"
    )


def to_json(
    summaries: list[SystemSummary], calls: Sequence[CallsSummary] = ()
) -> list[dict[str, Any]]:
    """The summaries as plain data; a system that has calls has them as `recorded`."""
    documents = {summary.system: asdict(summary) for summary in summaries}
    for found in calls:
        recorded = asdict(found)
        system = recorded.pop("system")
        documents.setdefault(system, {"system": system})["recorded"] = recorded
    return list(documents.values())


def lines(summary: SystemSummary) -> list[tuple[str, str]]:
    """One system as (name, text) pairs to print."""
    band = summary.noise_band
    by_status = ", ".join(f"{n} {name}" for name, n in summary.rows_by_status.items())
    return [
        ("GPU", f"{summary.gpu}; nodes x ranks per node: {', '.join(summary.shapes)}"),
        ("source", summary.source),
        ("collectives", ", ".join(summary.collectives)),
        (
            "rows",
            f"{summary.rows} ({by_status}); {summary.rows_with_time} with a time, "
            f"left out: {left_out_text(summary.rows_left_out)}",
        ),
        (
            "sizes",
            f"{summary.num_sizes}, {summary.min_size_bytes} to {summary.max_size_bytes} bytes",
        ),
        ("forced configs", str(summary.num_configs)),
        (
            "tasks",
            f"{summary.tasks}; default measured in {summary.tasks_with_default}, two forced "
            f"configs in {summary.tasks_with_two_forced}, both in {summary.tasks_scorable}",
        ),
        ("repeated cells", str(summary.cells_repeated)),
        ("verified", f"{summary.verified_share:.0%} of the rows that worked"),
        (
            "noise band",
            "unknown: no cell has two independent repeats"
            if band is None
            else f"{band:.2%} (nine in ten configs repeat within it; half within "
            f"{summary.noise_median:.2%})",
        ),
        *([("others wait for", summary.waited_for)] if summary.waited_for else []),
        *([("NICs lose packets", "; ".join(summary.lossy_nics))] if summary.lossy_nics else []),
    ]


def _summarise(part: pl.DataFrame, band: tuple[float, float] | None) -> SystemSummary:
    timed = usable(part)
    per_task = timed.group_by(TASK_COLUMNS).agg(
        forced=pl.struct(CONFIG_COLUMNS).filter(~pl.col("is_default")).n_unique(),
        default=pl.col("is_default").any(),
    )
    two_forced = per_task.filter(pl.col("forced") >= 2)
    repeats = timed.group_by([*TASK_COLUMNS, *CONFIG_COLUMNS]).agg(
        pl.struct(REPEAT_COLUMNS).n_unique().alias("n")
    )
    sources = sorted(part["source"].unique())
    shapes = part.select("num_nodes", "ranks_per_node").unique().sort(pl.all())
    return SystemSummary(
        system=part["system"][0],
        source=", ".join(sources),
        simulated=sources == [Source.SIMULATOR.value],
        gpu=", ".join(sorted(str(g) for g in part["gpu"].drop_nulls().unique())) or "unknown",
        shapes=[f"{n or '?'}x{r or '?'}" for n, r in shapes.iter_rows()],
        collectives=sorted(part["collective"].unique()),
        rows=part.height,
        rows_with_time=timed.height,
        rows_by_status=dict(part["status"].value_counts().sort("status").iter_rows()),
        rows_left_out=left_out(part),
        min_size_bytes=int(part.select(pl.col("size_bytes").min()).item()),
        max_size_bytes=int(part.select(pl.col("size_bytes").max()).item()),
        num_sizes=part["size_bytes"].n_unique(),
        num_configs=timed.filter(~pl.col("is_default")).select(CONFIG_COLUMNS).n_unique(),
        tasks=per_task.height,
        tasks_with_default=int(per_task["default"].sum()),
        tasks_with_two_forced=two_forced.height,
        tasks_scorable=int(two_forced["default"].sum()),
        cells_repeated=repeats.filter(pl.col("n") >= 2).height,
        verified_share=_share(part.filter(pl.col("status") == Status.OK.value)["verified"]),
        noise_band=band[0] if band else None,
        noise_median=band[1] if band else None,
        waited_for=waited_for(timed),
        lossy_nics=[port.text for port in lossy_ports(part)],
    )


def _share(flags: pl.Series) -> float:
    return int(flags.sum()) / len(flags) if len(flags) else 0.0
