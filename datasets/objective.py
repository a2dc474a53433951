"""The terms by which tables shorten a job's step: slack, or what compute loses to its calls.

A channel holds a multiprocessor (one CTA each: NCCL 2.30.7 `enqueue.cc:1756`), so the fastest call
alone need not make the shortest step (Lagom, arXiv 2602.20656).

T tasks, E kinds of products, A configs, NCCL's own choice first. Times are us of one call.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
import polars as pl
import typer

from dynamiccl.datasets import cells
from dynamiccl.datasets.manifest import JobTask, Losses, Manifest, Place, Slack
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.store import config_of, read, read_calls
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import Config, NcclVersion
from dynamiccl.sizes import BINS_PER_OCTAVE, size_bin

Objective = Annotated[str, typer.Option(metavar="call|job", help="Whose time: the step's is job.")]
SlackShare = Annotated[str | None, typer.Option("--slack", help="Loss for fewer channels: 5%.")]
Hidden = Annotated[str | None, typer.Option(metavar="all|DATA", help="Calls beside compute.")]
MaxChannels = Annotated[int | None, typer.Option(min=1, help="Most channels of any answer.")]
SmPrice = Annotated[float, typer.Option(min=0, max=3, help="Percent lost to a channel at most.")]

_SHAPE: Final = ("num_nodes", "num_ranks")
_PLACE: Final = ("collective", *_SHAPE, "bin")
#: Collective, nodes and ranks.
_Shape = tuple[str, int, int]
#: Parts of a task's calls, by how long compute beside them lasts.
_PARTS: Final = 10
OBJECTIVES: Final = ("call", "job")


#: The share of the measured loss to NCCL's own choice that the job surely has; another config may
#: cost all of it (benchmarks/bench_job_time.py, on other sweeps than it judges by).
OWN_LOSES: Final = 0.7
#: Share of the compute beside a call that hides it in every iteration.
EARLY: Final = 0.8
#: A call may take at most this many times as long.
_MOST_LONGER: Final = 2.0
_HALVINGS: Final = 20


def slack_of(
    manifest: Manifest,
    share: str | None,
    hidden: str | None,
    max_channels: int | None,
    objective: str,
    sm_price: float = 0.0,
) -> tuple[Slack | None, list[str]]:
    """The terms that a command's options ask for, else the policy's own; and notes on the calls.

    `share` as 5% or 0.05; `hidden`: `all` or a data directory with a job's calls and, for `job`,
    rows beside matrix products. Raises UserError for options that lack something or contradict a
    gate, NotEnoughData without read-back channels or a task with a known step time, and as
    `read_calls`.
    """
    if objective not in OBJECTIVES:
        raise UnknownName("objective", objective, OBJECTIVES, where="--objective")
    if objective == "call" and not (share or max_channels or hidden or sm_price):
        return manifest.slack, []
    part = _check_terms(share, hidden, objective, sm_price)
    read_back = [n for s in manifest.supports for c in s.channels.values() for n in c.values()]
    if not any(each is not None for counts in read_back for each in counts):
        raise NotEnoughData(
            "the policy does not know how many channels NCCL used: they were not read back; sweep "
            "with read-back, and train again"
        )
    told: Literal["all"] | list[Place] = "all" if hidden == "all" else []
    tasks, notes = list[JobTask](), list[str]()
    if hidden not in {None, "all"}:
        calls = read_calls(Path(str(hidden)))
        if objective == "job":
            rows = read(Path(str(hidden)))
            tasks, notes = job_tasks(calls, rows, manifest, is_priced=sm_price > 0.0)
            told = [task.place for task in tasks]
        else:
            told, notes = hidden_tasks(calls, manifest, part)
    slack = Slack(part, told, max_channels, tasks, sm_price / 100.0)
    if slack != manifest.slack and any(s.gated is not None for s in manifest.supports):
        judged = "without slack" if manifest.slack is None else f"for {manifest.slack.terms}"
        raise UserError(
            f"a gate judged the policy {judged}: leave out --slack, --objective, --hidden, "
            "--max-channels and --sm-price, or judge the run before the gate with these"
        )
    return slack, notes


def _check_terms(share: str | None, hidden: str | None, objective: str, sm_price: float) -> float:
    if sm_price and objective != "job":
        raise UserError(f"--sm-price {sm_price:g} is of the step's time: add --objective job")
    if objective == "job":
        if hidden in {None, "all"} or bool(sm_price) != (share is not None):
            raise UserError(
                "--objective job goes with --hidden DATA, the job's Kineto traces and a sweep "
                "beside matrix products in one data directory, and without --slack; or, for what "
                "was not measured so, with both --sm-price 0.3 and --slack 5%"
            )
    elif (share is None) != (hidden is None):
        raise UserError(
            "--slack and --hidden go together: --slack 5% with --hidden all, where compute hides "
            "every call, or --hidden DATA, Kineto traces as 'dynamiccl-collect import' reads them"
        )
    number = re.fullmatch(r"(\d+(?:\.\d*)?)(%?)", share or "0")
    part = float(number[1]) / (100.0 if number[2] else 1.0) if number else 1.0
    if part >= 1.0:
        raise UserError(f"--slack {share} is no share of a call's time: write 5% or 0.05")
    return part


def with_nodes(calls: pl.DataFrame, manifest: Manifest) -> tuple[pl.DataFrame, list[str]]:
    """The calls that a table may be asked about, with `bin` and `num_nodes`; notes.

    Untold `num_nodes`: by `placed` with the largest measured nodes; null for unnamed ranks whose
    number several measured shapes have.
    """
    shapes = {(s.num_nodes, s.num_ranks) for s in manifest.supports}
    per_node = max((ranks // nodes for nodes, ranks in shapes), default=1)
    asked = cells.asking(calls)
    found, guessed = cells.placed(asked, per_node)
    of_ranks = Counter(ranks for _, ranks in shapes)
    several = [ranks for ranks, count in of_ranks.items() if count > 1]
    is_told = asked["num_nodes"].is_not_null() | (asked["group_ranks"].list.len() > 0)
    is_open = ~is_told.fill_null(value=False) & asked["num_ranks"].is_in(several)
    nodes = pl.when(~is_open.fill_null(value=False)).then("num_nodes")
    note = (
        f"on how many nodes the ranks of {guessed} calls lie the traces do not say: taken to be up "
        f"to {per_node} a node, by their numbers, or else all of each node"
    )
    if is_open.any():
        note += (
            f"; but no table is asked about {is_open.sum()}, whose shape may be one of several: "
            "import with --nodes and --ranks"
        )
    return found.with_columns(num_nodes=nodes), [note] if guessed else []


def placed_calls(calls: pl.DataFrame, manifest: Manifest) -> tuple[pl.DataFrame, list[str]]:
    """As `with_nodes`, of measured shapes only; `time_us`, where untold, is an upper bound."""
    found, notes = with_nodes(calls, manifest)
    found = found.with_columns(time_us=pl.coalesce("time_us", "time_at_most_us"))
    shapes = {(s.num_nodes, s.num_ranks) for s in manifest.supports}
    measured = pl.DataFrame([*shapes], found.select(_SHAPE).schema, orient="row")
    return found.join(measured, on=_SHAPE, how="semi", maintain_order="left"), notes


def hidden_tasks(
    calls: pl.DataFrame, manifest: Manifest, share: float
) -> tuple[list[Place], list[str]]:
    """Tasks with at most `share` of their time exposed, and notes on the others."""
    asked, notes = placed_calls(calls, manifest)
    is_known = pl.all_horizontal(pl.col("exposed_us", "time_us").is_not_null()).all()
    tasks = asked.group_by(_PLACE).agg(
        is_known=is_known, exposed=pl.col("exposed_us").sum() / pl.col("time_us").sum()
    )
    known = tasks.filter("is_known")
    hidden = known.filter(pl.col("exposed") <= share).select(_PLACE).sort(_PLACE).rows()
    return hidden, [
        *notes,
        f"compute hides {len(hidden)} of {tasks.height} tasks (of whose calls at most {share:.3g} "
        f"is exposed); {tasks.height - known.height} without exposed times are taken as exposed, "
        f"and so are {calls.height - asked.height} calls whose size or shape was not measured, or "
        "about which NCCL asks no tuner",
    ]


def job_tasks(
    calls: pl.DataFrame, measurements: pl.DataFrame, manifest: Manifest, *, is_priced: bool
) -> tuple[list[JobTask], list[str]]:
    """Tasks of known step time, and notes; raises UserError (several systems), NotEnoughData."""
    names = {s.system for s in manifest.supports}
    for what, systems in (("the policy is", names), ("the calls are", set(calls["system"]))):
        if len(systems) > 1:
            told = ", ".join(sorted(systems))
            raise UserError(f"{what} of several systems ({told}), and a job's step is of one")
    # Tables are made for the newest measured release.
    held = [s.nccl_version for s in manifest.supports if s.nccl_version]
    newest = max(held, default=None, key=NcclVersion.parse)
    rows = cells.of_minor_release(measurements.filter(pl.col("system").is_in(names)), newest)
    (asked, notes), losses = placed_calls(calls, manifest), losses_of(rows)
    known = ("compute_ratio", "time_us")
    tasks = asked.group_by(_PLACE, maintain_order=True).agg(
        pl.col("time_us").mean(),
        pl.col("skew_us").fill_null(0.0).mean(),
        ratios=pl.col("compute_ratio").sort(),
        is_known=pl.all_horizontal(pl.col(known).is_not_null()).all(),
    )
    found: list[JobTask] = []
    for *place, time_us, skew_us, ratios, is_known in tasks.sort(_PLACE).iter_rows():
        near_by = near(losses.get(tuple(place[:3]), {}), place[3])
        if is_known and (near_by or is_priced) and max(ratios) > 0.0:
            parts = np.array_split(ratios, min(len(ratios), _PARTS))
            compute_us = [float(part[0]) * time_us for part in parts]
            found.append(JobTask(tuple(place), time_us, skew_us, compute_us, near_by))
    untold = int(tasks.height - tasks["is_known"].sum())
    waited = tasks.filter("is_known", pl.col("ratios").list.max() <= 0.0).height
    if not found:
        raise NotEnoughData(
            f"none of the job's {tasks.height} tasks has both compute beside it, as Kineto traces "
            f"tell it (not of {untold}; {waited} have none), and rows beside matrix products within"
            f" an octave on its ranks and nodes, of {' '.join(names)} under NCCL "
            f'{newest or "of no known release"}: sweep with [[interference]] kind = "matmul", '
            "or add --sm-price 0.3 --slack 5%"
        )
    far = tasks.height - untold - waited - len(found)
    unmeasured = sum(not task.losses for task in found)
    by_price = f", of {unmeasured} --sm-price says it" if is_priced else ""
    return found, [
        *notes,
        f"of {len(found) - unmeasured} of the job's {tasks.height} tasks it is known what compute "
        f"loses to them{by_price}; judged call by call are {waited} that compute waits for, "
        f"{untold} of which the traces do not tell that, and {far} without a row beside matrix "
        "products within an octave",
    ]


def losses_of(measurements: pl.DataFrame) -> dict[_Shape, dict[int, dict[str, Losses]]]:
    """Collective, nodes and ranks -> size bin -> products -> what each config costs compute.

    By rows beside products in the default environment. NaN for a config that was tried and not
    measured, or where NCCL's own choice was not. Of the sizes of a bin the largest tells, first of
    those where another config was tried.
    """
    rows = cells.comparable(cells.independent(cells.tuned(measurements))).drop_nulls(
        "compute_loss_us"
    )
    rows = rows.filter(launch_profile=DEFAULT_PROFILE)
    # A channel holds its multiprocessor as long as the kernel runs, whatever the size.
    share = pl.col("compute_loss_us") / pl.col("time_us")
    # Rates that differ before and behind the calls say how far off the loss may be.
    drift = pl.col("compute_aa_difference") * pl.col("compute_period_us") / pl.col("time_us")
    spread = pl.max_horizontal(share.std(), drift.abs().mean())
    keys = (
        *("collective", "num_nodes", "num_ranks", "size_bytes"),
        *("interference_kind", "interference_level"),
    )
    told = rows.group_by(*keys, *cells.CONFIG_COLUMNS, maintain_order=True).agg(
        pl.col("time_us").median(),
        share=share.mean(),
        # The error of a single row without drift is unknown: as large as the loss.
        error=(spread / pl.len().sqrt()).fill_null(share.mean().abs()),
    )
    own = told.filter("is_default").select(*keys, own_us="time_us")
    tried = cells.tuned(measurements).filter(launch_profile=DEFAULT_PROFILE)
    # Other kinds, as none at all, tell no loss anywhere.
    kinds = tried.drop_nulls("compute_loss_us")["interference_kind"].unique()
    tried = tried.filter(pl.col("interference_kind").is_in(kinds.implode()))
    told = (
        tried.select(*keys, *cells.CONFIG_COLUMNS)
        .unique(maintain_order=True)
        .join(told, [*keys, *cells.CONFIG_COLUMNS], "left", nulls_equal=True, maintain_order="left")
        .join(own, keys, "left", nulls_equal=True, maintain_order="left")
        .with_columns(longer=pl.col("time_us") / pl.col("own_us"))
        .with_columns(pl.col("share", "error", "longer").fill_null(np.nan))
        .sort(keys, maintain_order=True)
    )
    found = defaultdict[_Shape, dict[int, dict[str, Losses]]](lambda: defaultdict(dict))
    for place, table in told.partition_by(keys, maintain_order=True, as_dict=True).items():
        collective, nodes, ranks, size_bytes, kind, level = place
        names = ["" if row["is_default"] else config_of(row).key for row in table.to_dicts()]
        by_config = dict(zip(names, table.select("share", "error", "longer").rows(), strict=True))
        in_bin = found[collective, nodes, ranks][size_bin(size_bytes)]
        name = f"{kind} {level:g}"
        if _has_others(by_config) or not _has_others(in_bin.get(name, {})):
            in_bin[name] = by_config
    return found


def _has_others(by_config: Losses) -> bool:
    """Whether a config other than NCCL's own choice was tried."""
    return any(by_config)


def near(by_bin: dict[int, dict[str, Losses]], index: int) -> dict[str, Losses]:
    """Of each kind of products the known losses of its nearest size bin within an octave.

    First of bins where a config other than NCCL's own was tried; kinds beside which none was, at
    any size, only where all are so. None of a kind beside which NCCL's own choice is unknown: there
    no config is known to be better.
    """
    within = [other for other in by_bin if abs(other - index) <= BINS_PER_OCTAVE]
    # Stable: of those that say as much the nearest stays first.
    within.sort(key=lambda other: abs(other - index))
    told = [(kind, losses) for other in within for kind, losses in by_bin[other].items()]
    found: dict[str, Losses] = {}
    for kind, losses in sorted(told, key=lambda each: not _has_others(each[1])):
        found.setdefault(kind, losses)
    tried = {kind for each in by_bin.values() for kind in each if _has_others(each[kind])}
    return {
        kind: {config: loss for config, loss in found[kind].items() if not np.isnan(loss).any()}
        for kind in [kind for kind in found if kind in tried] or found
    }


def losses_at(losses: dict[str, Losses], configs: Sequence[Config]) -> tuple[Floats, Floats]:
    """(E, A) largest shares that compute surely loses, and times over NCCL's own; else NaN.

    NCCL's own choice (first) surely costs a standard error less than measured, others one more.
    """
    told = np.full((3, len(losses), len(configs)), np.nan)
    for row, by_config in enumerate(losses.values()):
        for action, config in enumerate(configs):
            told[:, row, action] = by_config.get(config.key if action else "", (np.nan,) * 3)
    share, error, longer = told
    error[:, 0] *= -1.0
    return np.clip(share + error, 0.0, 0.9), longer


def priced(channels: Floats, price: float) -> tuple[Floats, Floats]:
    """As `losses_at`, (2, A): for channels that cost nothing, and that cost `price`."""
    shares = np.clip(np.multiply.outer([0.0, price], channels), 0.0, 0.9)
    return shares, np.ones(shares.shape)


def fewest_within(
    times_us: Floats, channels: npt.NDArray[np.number], slack: float | Floats
) -> Ints:
    """(T,) the config with the fewest channels within the slack of the fastest.

    `times_us` (T, A) alone, NaN where not allowed; `channels` (T, A), never above NCCL's own (2.31
    only lowers them); `slack` a share, or (T, 1).
    """
    lower_us = np.where((channels <= channels[:, :1]) & ~np.isnan(times_us), times_us, np.inf)
    near = lower_us <= lower_us.min(axis=1, keepdims=True) * (1.0 + slack)
    counts = np.where(near, channels, np.inf)
    few_us = np.where(counts == counts.min(axis=1, keepdims=True), lower_us, np.inf)
    chosen: Ints = few_us.argmin(axis=1)
    return chosen


def step_change_us(times_us: Floats, loss: Floats, kernel_us: Floats, compute_us: Floats) -> Floats:
    """(..., T, A) change of the step by each config of a call.

    `times_us` and `loss` (..., T, A) are measured beside compute. From a job's trace of NCCL's
    choice come `kernel_us` (T,), waits included, and `compute_us` (T,), from the kernel's start to
    the end of the compute beside it, which that choice slows already.
    """
    kernel, compute = kernel_us[..., None], compute_us[..., None]
    work = compute - np.minimum(kernel, compute) * loss[..., :1]
    lasts = np.maximum(kernel + times_us - times_us[..., :1], 0.0)
    ends = np.minimum(work + lasts * loss, work / (1.0 - loss))
    return np.maximum(lasts, ends) - np.maximum(kernel, compute)


def sure_change_us(times_us: Floats, loss: Floats, kernel_us: Floats, compute_us: Floats) -> Floats:
    """(..., T, A) most that the step surely changes by, of sure `times_us`; 0 for NCCL's own."""
    factors = np.ones(loss.shape[-1])
    factors[0] = OWN_LOSES
    most = step_change_us(times_us, factors * loss, kernel_us, EARLY * compute_us)
    most[..., 0] = 0.0
    return most


def change_of_task_us(longer: Floats, loss: Floats, task: JobTask) -> Floats:
    """(A,) `sure_change_us` of a job's mean call that takes `longer` (E, A) times NCCL's own time.

    The most by any of the E kinds of compute that `loss` (E, A) is of, and for the rank whose
    kernel waits as for the one for which the others wait; NaN where one loss is not known.
    """
    times, compute_us = task.time_us * longer, np.array(task.compute_us)[:, None]
    times[:, 0] = task.time_us
    changes = [
        # Compute beside a kernel lasts in proportion to it, waits included.
        sure_change_us(times, loss, np.array(each * task.time_us), each * compute_us).mean(axis=0)
        for each in (1.0, 1.0 + task.skew_us / task.time_us)
    ]
    return np.asarray(np.max(changes, axis=(0, 1)))


def may_take(loss: Floats, task: JobTask) -> Floats:
    """(A,) times NCCL's own time, from 1 on, up to which the step is surely no longer."""
    low, high = np.ones(loss.shape[1]), np.full(loss.shape[1], _MOST_LONGER)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ok = change_of_task_us(np.tile(middle, (len(loss), 1)), loss, task) <= 0.0
        low, high = np.where(ok, middle, low), np.where(ok, high, middle)
    low[0] = 1.0
    return low
