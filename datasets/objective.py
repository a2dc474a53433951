"""The choice of a config by the time of the step: with slack, or by what compute loses to a call.

A channel holds a multiprocessor (one CTA each: NCCL 2.30.7 `enqueue.cc:1756`), so what is fastest
alone need not make the shortest step (Lagom, arXiv 2602.20656). T tasks, A configs, of which the
first is NCCL's own choice. Times are of one call, in us.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from dynamiccl.datasets.cells import asking
from dynamiccl.datasets.manifest import Manifest, Place, Slack
from dynamiccl.datasets.store import read_calls
from dynamiccl.drawn_worlds import Floats, Ints
from dynamiccl.errors import NotEnoughData, UserError


def fewest_within(
    times_us: Floats, channels: npt.NDArray[np.number], slack: float | Floats
) -> Ints:
    """(T,) of the configs within the slack of the fastest, the one with the fewest channels.

    `times_us` (T, A) of calls alone, NaN where a config may not be chosen; `channels` (T, A) that
    ran, never above NCCL's own (2.31 only lowers them). `slack` is a share of the fastest's time,
    (T, 1) where tasks differ: 0 where the GPU waits for the call. ValueError without NCCL's time.
    """
    if np.isnan(times_us[:, 0]).any():
        raise ValueError("NCCL's own choice has no time: measure it, too, or leave the task out")
    lower_us = np.where((channels <= channels[:, :1]) & ~np.isnan(times_us), times_us, np.inf)
    near = lower_us <= lower_us.min(axis=1, keepdims=True) * (1.0 + slack)
    counts = np.where(near, channels, np.inf)
    few_us = np.where(counts == counts.min(axis=1, keepdims=True), lower_us, np.inf)
    chosen: Ints = few_us.argmin(axis=1)
    return chosen


def step_change_us(times_us: Floats, loss: Floats, kernel_us: Floats, compute_us: Floats) -> Floats:
    """(..., T, A) change of the step by each config of a call.

    `times_us` and `loss` (..., T, A), the share of its speed that compute loses while the kernel is
    on the GPU, are measured beside compute. A job's trace tells of NCCL's choice `kernel_us` (T,),
    with waits for other ranks, and `compute_us` (T,), from its start to the end of the compute
    beside it, 0 without any, which its own choice slows already: only differences count.
    """
    kernel, compute = kernel_us[..., None], compute_us[..., None]
    work = compute - np.minimum(kernel, compute) * loss[..., :1]
    lasts = np.maximum(kernel + times_us - times_us[..., :1], 0.0)
    ends = np.minimum(work + lasts * loss, work / (1.0 - loss))
    return np.maximum(lasts, ends) - np.maximum(kernel, compute)


def least_change(change_us: Floats, caution: float = 1.0) -> Ints:
    """(T,) the config with the least mean + caution x spread over draws of its change (D, T, A).

    NaN: may not be chosen. NCCL's own is 0, so gains must exceed `caution` times their spread.
    """
    worth = change_us.mean(axis=0) + caution * change_us.std(axis=0)
    chosen: Ints = np.where(np.isnan(worth), np.inf, worth).argmin(axis=1)
    return chosen


def slack_of(
    manifest: Manifest, share: str | None, hidden: str | None, max_channels: int | None
) -> tuple[Slack | None, list[str]]:
    """The slack that the options of a command ask for, and what to say of the calls.

    `share` as 5% or 0.05; `hidden` is `all` or a data directory with a job's calls. Without options
    it is the policy's own, as a gate judged it. Raises UserError for options that lack something or
    contradict the gate, NotEnoughData where no channels were read back, and as `read_calls`.
    """
    if share is None and max_channels is None and hidden is None:
        return manifest.slack, []
    if (share is None) != (hidden is None):
        raise UserError(
            "--slack and --hidden go together: --slack 5% with --hidden all, where compute hides "
            "every call, or --hidden DATA, Kineto traces as 'dynamiccl-collect import' reads them"
        )
    number = re.fullmatch(r"(\d+(?:\.\d*)?)(%?)", share or "0")
    part = float(number[1]) / (100.0 if number[2] else 1.0) if number else 1.0
    if part >= 1.0:
        raise UserError(f"--slack {share} is no share of a call's time: write 5% or 0.05")
    read_back = [n for s in manifest.supports for c in s.channels.values() for n in c.values()]
    if not any(each is not None for counts in read_back for each in counts):
        raise NotEnoughData(
            "the policy does not know how many channels NCCL used: they were not read back; sweep "
            "with read-back, and train again"
        )
    notes: list[str] = []
    told: Literal["all"] | list[Place] = "all" if hidden == "all" else []
    if hidden not in {None, "all"}:
        told, notes = _hidden_tasks(read_calls(Path(str(hidden))), manifest, part)
    slack = Slack(part, told, max_channels)
    if slack != manifest.slack and any(s.gated is not None for s in manifest.supports):
        judged = "without slack" if manifest.slack is None else f"for {manifest.slack.terms}"
        raise UserError(
            f"a gate judged the policy {judged}: leave out --slack, --hidden and --max-channels, "
            "or judge the run before the gate with these"
        )
    return slack, notes


def _hidden_tasks(
    calls: pl.DataFrame, manifest: Manifest, share: float
) -> tuple[list[Place], list[str]]:
    """Tasks of whose calls' time at most the share is exposed, and what to say of the others.

    A trace that does not tell the nodes is of the one shape measured that has so many ranks. Of
    ranks that differ the least times are known, of calls as of what is exposed of them.
    """
    shapes = {(s.num_ranks, s.num_nodes) for s in manifest.supports}
    ranks = Counter(num_ranks for num_ranks, _ in shapes)
    only = {num_ranks: nodes for num_ranks, nodes in shapes if ranks[num_ranks] == 1}
    nodes = pl.col("num_ranks").replace_strict(only, default=None, return_dtype=pl.Int64)
    placed = asking(calls).with_columns(
        num_nodes=pl.coalesce("num_nodes", nodes),
        time_us=pl.coalesce("time_us", "time_at_most_us"),
    )
    placed = placed.drop_nulls(["num_nodes", "num_ranks"])
    is_known = pl.all_horizontal(pl.col("exposed_us", "time_us").is_not_null()).all()
    keys = ("collective", "num_nodes", "num_ranks", "bin")
    tasks = placed.group_by(keys).agg(
        is_known=is_known, exposed=pl.col("exposed_us").sum() / pl.col("time_us").sum()
    )
    known = tasks.filter("is_known")
    hidden = known.filter(pl.col("exposed") <= share).select(keys).sort(keys).rows()
    return hidden, [
        f"compute hides {len(hidden)} of {tasks.height} tasks (of whose calls at most {share:.3g} "
        f"is exposed); {tasks.height - known.height} without exposed times are taken as exposed, "
        f"and so are {calls.height - placed.height} calls whose size or shape is not known, or "
        "about which NCCL asks no tuner"
    ]
