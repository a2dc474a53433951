"""Reads a job's trace: files of other tools, or a `calls` table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import polars as pl

from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.evaluate.forecast.job import Job, job_of

#: Under which names the rows of traces stand; nothing is kept of them.
_NAME: Final = "trace"


def read_job(paths: Sequence[Path], ranks_per_node: int | None = None) -> Job:
    """The job of which the traces are.

    A directory with a `calls` table is read as such; all else by its content, as
    `dynamiccl-collect import` does. Raises MissingPath, UserError, NotEnoughData, and what the
    readers raise.
    """
    tables: dict[str, list[pl.DataFrame]] = {"calls": [], "steps": []}
    files = []
    notes: list[str] = []
    for path in paths:
        if not path.exists():
            raise MissingPath("trace", path, "name a trace, or a directory of them or of data")
        if path.is_dir() and part_paths(path, "calls"):
            tables["calls"].append(read(path, "calls"))
            if part_paths(path, "steps"):
                tables["steps"].append(read(path, "steps"))
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
        tables["calls"].append(pl.DataFrame(traces.calls))
        tables["steps"].append(pl.DataFrame(traces.steps))
        notes += [f"not read: {error}" for error in traces.errors]
    steps = pl.concat(tables["steps"]) if tables["steps"] else None
    job = job_of(pl.concat(tables["calls"]), steps, ranks_per_node)
    job.notes.extend(notes)
    return job
