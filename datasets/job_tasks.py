"""By what terms tables shorten the step: a job's calls as tasks, and what compute loses to them.

The calls are those of traces (`calls`), the losses those of a sweep beside matrix products
(BESIDE_COLUMNS of the measurements). Both are taken from what was measured: where no row beside
products lies within an octave of a task, nothing is said of it.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import polars as pl

from dynamiccl.datasets.cells import asking, comparable, independent, nodes_of, tuned
from dynamiccl.datasets.manifest import JobTask, Manifest, Place, Slack
from dynamiccl.datasets.store import read, read_calls
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.sizes import BINS_PER_OCTAVE, size_bin

_PLACE: Final = ("collective", "num_nodes", "num_ranks", "bin")
#: Of the calls of a task, the share that compute may hide less than is counted on.
_LEAST_HIDDEN: Final = 0.1
#: Whose time a table is to shorten: of each call, or of the job's step.
OBJECTIVES: Final = ("call", "job")
#: Edge -> channels -> share of compute's speed lost, and its standard error.
Losses = dict[str, dict[int, tuple[float, float]]]


def slack_of(
    manifest: Manifest,
    share: str | None,
    hidden: str | None,
    max_channels: int | None,
    objective: str,
) -> tuple[Slack | None, list[str]]:
    """The terms that the options of a command ask for, and what to say of the calls.

    `share` as 5% or 0.05; `hidden` is `all` or a data directory with a job's calls, which has rows
    beside matrix products, too, for `objective` job (one of OBJECTIVES). Without options they are
    the policy's own, as a gate judged it. Raises UserError for options that lack something or
    contradict the gate, NotEnoughData where no channels were read back or no task's step time is
    known, and as `read_calls`.
    """
    if objective not in OBJECTIVES:
        raise UnknownName("objective", objective, OBJECTIVES, where="--objective")
    if objective == "call" and share is None and max_channels is None and hidden is None:
        return manifest.slack, []
    part = _check_terms(share, hidden, objective)
    read_back = [n for s in manifest.supports for c in s.channels.values() for n in c.values()]
    if not any(each is not None for counts in read_back for each in counts):
        raise NotEnoughData(
            "the policy does not know how many channels NCCL used: they were not read back; sweep "
            "with read-back, and train again"
        )
    notes: list[str] = []
    told: Literal["all"] | list[Place] = "all" if hidden == "all" else []
    tasks: list[JobTask] = []
    if hidden not in {None, "all"}:
        calls = read_calls(Path(str(hidden)))
        if objective == "job":
            tasks, notes = job_tasks(calls, read(Path(str(hidden))), manifest)
            told = [task.place for task in tasks]
        else:
            told, notes = hidden_tasks(calls, manifest, part)
    slack = Slack(part, told, max_channels, tasks)
    if slack != manifest.slack and any(s.gated is not None for s in manifest.supports):
        judged = "without slack" if manifest.slack is None else f"for {manifest.slack.terms}"
        raise UserError(
            f"a gate judged the policy {judged}: leave out --slack, --objective, --hidden and "
            "--max-channels, or judge the run before the gate with these"
        )
    return slack, notes


def _check_terms(share: str | None, hidden: str | None, objective: str) -> float:
    """The slack as a share; raises UserError where options lack each other."""
    if objective == "job":
        if share is not None or hidden in {None, "all"}:
            raise UserError(
                "--objective job goes with --hidden DATA and without --slack: DATA with the job's "
                "Kineto traces and a sweep beside matrix products, in one data directory"
            )
        return 0.0
    if (share is None) != (hidden is None):
        raise UserError(
            "--slack and --hidden go together: --slack 5% with --hidden all, where compute hides "
            "every call, or --hidden DATA, Kineto traces as 'dynamiccl-collect import' reads them"
        )
    number = re.fullmatch(r"(\d+(?:\.\d*)?)(%?)", share or "0")
    part = float(number[1]) / (100.0 if number[2] else 1.0) if number else 1.0
    if part >= 1.0:
        raise UserError(f"--slack {share} is no share of a call's time: write 5% or 0.05")
    return part


def placed_calls(calls: pl.DataFrame, manifest: Manifest) -> pl.DataFrame:
    """The calls that a table may be asked about, with `bin`, `num_nodes` and `time_us`.

    A trace that does not tell the nodes is of the one shape measured that has so many ranks. Of
    ranks that differ the least times are known, of calls as of what is exposed of them.
    """
    only = nodes_of({(s.num_nodes, s.num_ranks) for s in manifest.supports})
    nodes = pl.col("num_ranks").replace_strict(only, default=None, return_dtype=pl.Int64)
    placed = asking(calls).with_columns(
        num_nodes=pl.coalesce("num_nodes", nodes),
        time_us=pl.coalesce("time_us", "time_at_most_us"),
    )
    return placed.drop_nulls(["num_nodes", "num_ranks"])


def hidden_tasks(
    calls: pl.DataFrame, manifest: Manifest, share: float
) -> tuple[list[Place], list[str]]:
    """Tasks of whose calls' time at most the share is exposed, and what to say of the others."""
    placed = placed_calls(calls, manifest)
    is_known = pl.all_horizontal(pl.col("exposed_us", "time_us").is_not_null()).all()
    tasks = placed.group_by(_PLACE).agg(
        is_known=is_known, exposed=pl.col("exposed_us").sum() / pl.col("time_us").sum()
    )
    known = tasks.filter("is_known")
    hidden = known.filter(pl.col("exposed") <= share).select(_PLACE).sort(_PLACE).rows()
    return hidden, [
        f"compute hides {len(hidden)} of {tasks.height} tasks (of whose calls at most {share:.3g} "
        f"is exposed); {tasks.height - known.height} without exposed times are taken as exposed, "
        f"and so are {calls.height - placed.height} calls whose size or shape is not known, or "
        "about which NCCL asks no tuner"
    ]


def job_tasks(
    calls: pl.DataFrame, measurements: pl.DataFrame, manifest: Manifest
) -> tuple[list[JobTask], list[str]]:
    """The tasks whose step time can be told, and what to say of the others.

    A kernel waits for other ranks by half of what they differ, and compute lasts as beside the
    least hidden tenth of the calls. Raises NotEnoughData where no task is left.
    """
    placed = placed_calls(calls, manifest)
    kernel_us = pl.col("time_us") + pl.col("skew_us").fill_null(0.0) / 2
    tasks = placed.group_by(_PLACE).agg(
        pl.col("time_us").mean(),
        kernel_us=kernel_us.mean(),
        ratio=pl.col("compute_ratio").quantile(_LEAST_HIDDEN, "lower"),
        is_known=pl.all_horizontal(pl.col("compute_ratio", "time_us").is_not_null()).all(),
    )
    losses = losses_of(measurements)
    found: list[JobTask] = []
    for *place, time_us, each_us, ratio, is_known in tasks.sort(_PLACE).iter_rows():
        collective, nodes, ranks, index = place
        loss = near(losses.get((collective, nodes, ranks), {}), index)
        if is_known and loss and ratio > 0.0:
            found.append(JobTask(tuple(place), time_us, each_us, ratio * each_us, loss))
    untold = int(tasks.height - tasks["is_known"].sum())
    waited = tasks.filter("is_known", ratio=0.0).height
    if not found:
        raise NotEnoughData(
            f"none of the job's {tasks.height} tasks has both compute beside it, as Kineto traces "
            f"tell it (not of {untold}; {waited} have none), and rows beside matrix products within"
            " an octave on its ranks and nodes, read back: sweep with [[interference]] kind = "
            '"matmul"'
        )
    far = tasks.height - untold - waited - len(found)
    return found, [
        f"of {len(found)} of the job's {tasks.height} tasks it is known what compute loses to "
        f"them; judged call by call are {waited} that compute waits for, {untold} of which the "
        f"traces do not tell that, and {far} without a row beside matrix products within an octave"
    ]


def losses_of(measurements: pl.DataFrame) -> dict[tuple[str, int, int], dict[int, Losses]]:
    """Collective, nodes and ranks -> size bin -> what compute loses, by rows beside products.

    With more channels compute never loses less: where means say so, both are what lies between.
    """
    rows = comparable(independent(tuned(measurements))).drop_nulls(
        ["compute_loss_us", "actual_num_channels"]
    )
    # Of the kernel's own time: whatever the size, a channel holds its multiprocessor so long.
    share = pl.col("compute_loss_us") / pl.col("time_us")
    keys = ("collective", "num_nodes", "num_ranks", "size_bytes", "interference_level")
    told = rows.group_by(*keys, "actual_num_channels").agg(
        share=share.mean(), error=share.std() / pl.len().sqrt()
    )
    told = told.sort(*keys, "actual_num_channels")
    found = defaultdict[tuple[str, int, int], dict[int, Losses]](lambda: defaultdict(dict))
    for key, part in told.group_by(keys, maintain_order=True):
        collective, nodes, ranks, size, edge = key
        means = part["share"].to_numpy()
        above = np.maximum.accumulate(means)
        below = np.minimum.accumulate(means[::-1])[::-1]
        rising = np.clip((above + below) / 2, 0.0, 0.9)
        # Of a single row the error is not known: as large as what it says.
        errors = part["error"].fill_null(np.inf).to_numpy()
        by_count = zip(part["actual_num_channels"], rising, np.minimum(errors, rising), strict=True)
        losses = {int(n): (float(mean), float(error)) for n, mean, error in by_count}
        found[collective, nodes, ranks][size_bin(int(size))][f"{edge:g}"] = losses
    return found


def near(by_bin: dict[int, Losses], index: int) -> Losses:
    """The losses of the size bin that lies nearest, within an octave; empty where none does."""
    near_by = [other for other in by_bin if abs(other - index) <= BINS_PER_OCTAVE]
    return by_bin[min(near_by, key=lambda other: abs(other - index))] if near_by else {}


def losses_at(losses: Losses, channels: Sequence[float] | Floats) -> Floats:
    """(E, A) shares that compute surely loses at most, by edge; NaN where nobody measured it.

    The first of `channels` (A,) is NCCL's own choice, of which the mean counts, as of what takes as
    many; fewer channels lose a standard error more than their mean, but no more than NCCL's own.
    Between counts that were measured the larger holds, and for NCCL's own the smaller.
    """
    counts = np.asarray(channels, dtype=np.float64)
    found = np.full((len(losses), len(counts)), np.nan)
    for row, by_count in zip(found, losses.values(), strict=True):
        below = [n for n in by_count if n <= counts[0]]
        if not below:
            continue
        own = by_count[max(below)][0]
        for action, count in enumerate(counts):
            least = min((n for n in by_count if n >= count), default=None)
            if count == counts[0]:
                row[action] = own
            elif count < counts[0] and least is not None:
                row[action] = min(sum(by_count[least]), own)
    return found
