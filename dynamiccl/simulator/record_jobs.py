"""`dynamiccl-collect jobs`: simulates jobs that explore and records their calls, to train on.

A share of the calls runs a random config, held for some calls of the key: who watches a config has
to see more than one. Each job is a run, each group shape of it a communicator.
"""

import hashlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import typer
from rich.console import Console
from rich.progress import Progress

from dynamiccl import cli
from dynamiccl.datasets.schema import CALLS, CallSource
from dynamiccl.datasets.store import check_slug, program_record, write_part
from dynamiccl.errors import UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator import workloads as simulating
from dynamiccl.simulator.scenario import Scenario, find_scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import System, find_system
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import CallResults, Jobs, World

_ABSTAIN_ACTION: Final = 0
#: As NCCL runs a channel; no simulated time depends on it.
_WARPS: Final = 16
_BEGIN: Final = datetime(2026, 1, 1, tzinfo=UTC)


class Explorer:
    """Random configs of N jobs: `share` of the calls run one, held for `hold_calls` on average."""

    def __init__(
        self, world: World, num_jobs: int, share: float, hold_calls: float, seed: int
    ) -> None:
        self._world, self._share, self._hold_calls = world, share, hold_calls
        self._random = np.random.default_rng(seed)
        self._job = np.arange(num_jobs)
        keys = np.tile(np.arange(len(world.keys)), (num_jobs, 1))
        self._held = self._draw(keys.reshape(-1)).reshape(keys.shape)

    def act(self, jobs: Jobs) -> npt.NDArray[np.int64]:
        """(N,) actions for the next calls."""
        key = jobs.key
        again = self._random.random(len(key)) < 1.0 / self._hold_calls
        drawn = np.where(again, self._draw(key), self._held[self._job, key])
        self._held[self._job, key] = drawn
        return drawn

    def _draw(self, key: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        mask = self._world.mask[key]
        drawn = (self._random.random(mask.shape) * mask).argmax(axis=1)
        explores = self._random.random(len(key)) < self._share
        return np.where(explores, drawn, _ABSTAIN_ACTION)


def all_configs(system: System, workload: Workload) -> tuple[Config, ...]:
    """NCCL's choice, and every (algorithm, protocol) of the workload's calls."""
    places = dict.fromkeys((call.group, call.collective) for call in workload.calls)
    cells = {cell for place in places for cell in system.cells(*place)}
    return (ABSTAIN, *(Config(*cell) for cell in sorted(cells)))


def check_workload(system: System, workload: Workload) -> None:
    """Raise UserError for a group or a collective that the system lacks."""
    shapes = {group: f"{group.num_nodes}x{group.ranks_per_node}" for group in system.groups()}
    names = {collective: collective.wire for collective in system.collectives()}
    for call in workload.calls:
        if call.group not in shapes:
            raise UserError(
                f"{system.name} has no group of {call.group.num_nodes} nodes x "
                f"{call.group.ranks_per_node} ranks, which {workload.name} calls on; it has "
                f"{', '.join(shapes.values())}: choose --nodes, --ranks-per-node, --workload by it"
            )
        if call.collective not in names:
            raise UserError(
                f"{system.name} has no {call.collective.wire}, which {workload.name} calls; it has "
                f"{', '.join(names.values())}: choose another --workload"
            )


def write_calls(out: Path, world: World, name: str, ran: Sequence[CallResults]) -> list[Path]:
    """Write the calls of N jobs, step by step; `name` is the sweep, and with a number the run."""
    key, action = (np.stack([getattr(each, what) for each in ran]) for what in ("key", "action"))
    size = key.size
    time_us = np.stack([each.measured_us for each in ran]).reshape(size)
    step, job = (part.reshape(size) for part in np.indices(key.shape))
    key, action = key.reshape(size), action.reshape(size)
    flags = ("probe", "graph_captured", "sampled", "incomplete")
    columns: dict[str, Any] = {
        **_facts(world, key),
        **{flag: np.zeros(size, dtype=np.bool_) for flag in flags},
        "run": [f"{name}-{each}" for each in job],
        "sweep": [name] * size,
        "source": [CallSource.SIMULATOR.value] * size,
        "sequence": step,
        "replay": np.zeros(size, dtype=np.int64),
        "timestamp": [_BEGIN + timedelta(milliseconds=int(each)) for each in step],
        "actual_algorithm": np.array([a.wire for a in Algorithm])[world.algorithm[key, action]],
        "actual_protocol": np.array([p.wire for p in Protocol])[world.protocol[key, action]],
        "actual_num_channels": world.num_channels[key, action],
        "actual_num_warps": np.full(size, _WARPS),
        "table": np.ones(size, dtype=np.int64),
        "decided": action != _ABSTAIN_ACTION,
        "asks_tuner": np.ones(size, dtype=np.bool_),
        "time_us": time_us,
        "time_at_most_us": time_us,
        "skew_us": np.stack([each.skew_us for each in ran]).reshape(size),
        "ranks_agree": np.ones(size, dtype=np.bool_),
    }
    known = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(size, field.type)
        for field in CALLS
    ]
    table = pa.Table.from_arrays(known, schema=CALLS)
    return write_part(out, table, kind="calls", provenance=program_record("simulator"))


def _facts(world: World, key: npt.NDArray[np.int64]) -> dict[str, Any]:
    groups = [call.group for call in world.keys]
    by_key: dict[str, list[Any]] = {
        "collective": [call.collective.wire for call in world.keys],
        "size_bytes": [call.size_bytes for call in world.keys],
        "num_nodes": [group.num_nodes for group in groups],
        "ranks_per_node": [group.ranks_per_node for group in groups],
        "num_ranks": [group.num_ranks for group in groups],
        "comm": [hashlib.sha256(f"{group}".encode()).hexdigest()[:16] for group in groups],
    }
    found = {name: np.array(values)[key].tolist() for name, values in by_key.items()}
    found["ranks_seen"] = found["ranks_timed"] = found["num_ranks"]
    known = {"system": world.system.name, **world.system.environment}
    return found | {n: [value] * len(key) for n, value in known.items() if n in CALLS.names}


def record_jobs(
    out: Path,
    system: System,
    workload: Workload,
    scenario: Scenario,
    *,
    share: float,
    hold_calls: float,
    jobs: int,
    calls: int,
    seed: int,
    name: str,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Path]:
    """Simulate jobs, write `calls` and return the parts. Raises UserError as `check_workload`."""
    check_workload(system, workload)
    world = World(system, workload, all_configs(system, workload), scenario)
    running = world.jobs(jobs, seed)
    explorer = Explorer(world, jobs, share, hold_calls, seed + 1)
    ran = []
    for _ in range(calls):
        ran.append(running.step(explorer.act(running)))
        progress(1)
    return write_calls(out, world, name, ran)


def jobs_command(
    out: Annotated[Path, typer.Option("--out", help="Data directory to add to.")],
    system: simulating.SystemOption = simulating.DEFAULT_SYSTEM,
    scenario: simulating.ScenarioOption = simulating.DEFAULT_SCENARIO,
    workload: simulating.WorkloadOption = None,
    nodes: simulating.NodesOption = 4,
    ranks_per_node: simulating.RanksPerNodeOption = 8,
    jobs: Annotated[int, typer.Option(help="How many jobs.", min=1)] = 8,
    calls: simulating.CallsOption = 10_000,
    explore: Annotated[
        float, typer.Option(help="Share of calls with a config drawn at random.", min=0, max=1)
    ] = 0.3,
    hold: Annotated[
        float, typer.Option(help="Calls of a task key that a draw lasts on average.", min=1)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of surroundings, noise and draws.")] = 0,
    name: Annotated[str, typer.Option(help="The sweep that the calls belong to.")] = "jobs",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON document to stdout.")
    ] = False,
) -> None:
    """Simulate jobs and write what the plugin would have recorded of their calls.

    Example: dynamiccl-collect jobs --scenario congested --workload decode --out out/data
    """
    simulated = find_system(system)
    work = make_workload(workload or simulating.DEFAULT_WORKLOADS, Group(nodes, ranks_per_node))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("calls", total=calls)
        parts = record_jobs(
            *(out, simulated, work, find_scenario(scenario)),
            share=explore,
            hold_calls=hold,
            jobs=jobs,
            calls=calls,
            seed=seed,
            name=check_slug(name, "name"),
            progress=lambda count: progress.advance(bar, count),
        )
    if as_json:
        cli.print_json({"calls": jobs * calls, "parts": [str(path) for path in parts]})
    else:
        print(f"{jobs * calls} calls of {jobs} jobs -> {out}")
