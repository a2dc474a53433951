"""Reads the inputs of a forecast: traces, a sweep or a simulated system, a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from dynamiccl.collect.traces import read_traces
from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.store import part_paths, read
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.evaluate.forecast.forecast import Forecast, forecast
from dynamiccl.evaluate.forecast.gains import Measured, Modelled, Source
from dynamiccl.evaluate.forecast.job import Job, job_of
from dynamiccl.evaluate.forecast.picks import Choose, policy_choice
from dynamiccl.nccl import Config
from dynamiccl.simulator.systems import find_system

#: Under which names the rows of traces stand; nothing is kept of them.
_NAME: Final = "trace"


@dataclass(frozen=True, slots=True)
class ForecastInputs:
    """The inputs of a forecast."""

    #: A data directory with a sweep; None: the simulated system `system`.
    data: Path | None
    #: Which system of `data`, where it has several.
    system: str | None
    policy: str | None
    tracking_uri: str
    #: (nodes, ranks a node) of process groups, and GPUs of a node, where the trace does not say.
    groups: Sequence[tuple[int, int]]
    ranks_per_node: int | None
    least: float


def look_ahead(traces: Sequence[Path], asked: ForecastInputs) -> Forecast:
    """Read the inputs, and forecast. Raises what the readers raise."""
    frame = None if asked.data is None else read(asked.data)
    simulated = find_system(asked.system or "") if frame is None else None
    job = _read_job(traces, asked.ranks_per_node)
    loaded, configs, runs = None, tuple[Config, ...](), set[str]()
    if asked.policy is not None:
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        loaded = TorchPolicy.load(policy_directory(asked.policy, asked.tracking_uri))
        configs, runs = loaded.manifest.actions().configs, set(loaded.manifest.runs)
    source: Source
    if simulated is not None:
        source = Modelled(simulated, configs)
    elif frame is not None:
        source = Measured(frame, asked.system, job.nccl_version)
    choose: Choose | None = None if loaded is None else policy_choice(loaded, source.system)
    return forecast(
        job,
        source,
        groups=asked.groups,
        policy=choose,
        seen=frame is not None and bool(runs & set(run_names(frame))),
        least=asked.least,
        modelled=frame is None,
    )


def _read_job(paths: Sequence[Path], ranks_per_node: int | None) -> Job:
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
