"""Writes the sweep that a gate needs: single tasks of another sweep's grid, two configs each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from dynamiccl.collect.grid import RANK_GRAIN_BYTES, Setting, octave_ladder
from dynamiccl.collect.planning.plan import Plan, make_plan
from dynamiccl.collect.sweep import (
    BudgetSettings,
    InterferenceSettings,
    OnlySettings,
    ProfileSettings,
    Sizes,
    StrategySettings,
    Sweep,
    parse_sweep,
    sweep_text,
)
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.nccl import Collective, Config
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin

_WHERE: Final = "the fresh sweep"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FreshTask:
    """One config in some size bins of one collective and group shape."""

    collective: Collective
    num_nodes: int
    ranks_per_node: int
    config: Config
    bins: Sequence[int]


def check_target(write: Path) -> None:
    """Raise UserError or MissingPath when the file cannot be created."""
    if write.exists():
        raise UserError(f"--plan {write}: it exists already; name another file, or remove it")
    if not write.parent.is_dir():
        raise MissingPath("directory", write.parent, "make it, or write elsewhere")


def write_fresh(
    base: Sweep, name: str, asked: Sequence[FreshTask], cycles: int, write: Path
) -> Plan:
    """Write the sweep of the requested tasks, `cycles` times over, and return its plan.

    All else is the base's: launcher, runner, iterations. Other launch profiles and what runs beside
    are left out, as a gate takes neither. Raises UserError where no size can be measured.
    """
    only = tuple(entry for one in asked if (entry := _entry(one)) is not None)
    if not only:
        raise UserError("none of the size bins holds a size of whole shares of a rank")
    file = base.file
    shapes = {(one.num_nodes, one.ranks_per_node) for one in only}
    update = {
        "name": name,
        "collectives": _each(one.collective for one in only),
        "groups": tuple(
            g for g in file.groups if (g.num_nodes, g.ranks_per_node) in shapes and g.split is None
        ),
        "sizes": Sizes(list=tuple(sorted({size for one in only for size in one.sizes}))),
        "algorithms": _each(one.algorithm for one in only),
        "protocols": _each(one.protocol for one in only),
        "num_channels": _each(one.num_channels for one in only),
        "chunk_sizes": _each(one.chunk_size for one in only),
        "profiles": (ProfileSettings(name=DEFAULT_PROFILE),),
        "interference": (InterferenceSettings(),),
        "only": only,
        "cycles": cycles,
        "strategy": StrategySettings(),
        "budget": BudgetSettings(),
        # Other noise, as other runs have.
        "simulator": file.simulator.model_copy(update={"seed": file.simulator.seed + 1}),
    }
    head = f"Fresh runs of sweep {file.name} for a gate, by dynamiccl-evaluate gate --plan."
    sweep = parse_sweep(sweep_text(file.model_copy(update=update), head=head), where=_WHERE)
    plan = make_plan(sweep)
    write.write_text(sweep.text, encoding="utf-8")
    return plan


def _entry(asked: FreshTask) -> OnlySettings | None:
    """The `only` entry of the sweep file; None where no bin holds a valid size."""
    setting = Setting(asked.collective, asked.num_nodes, asked.ranks_per_node)
    sizes = tuple(size for each in asked.bins if (size := _size_in(each, setting)) is not None)
    config = asked.config
    if not sizes or config.algorithm is None or config.protocol is None:
        return None
    return OnlySettings(
        collective=asked.collective.wire,
        num_nodes=asked.num_nodes,
        ranks_per_node=asked.ranks_per_node,
        sizes=sizes,
        algorithm=config.algorithm.wire,
        protocol=config.protocol.wire,
        num_channels=config.num_channels or 0,
        chunk_size=config.chunk_bytes or 0,
    )


def _size_in(index: int, setting: Setting) -> int | None:
    """A size that is in the bin after nccl-tests' rounding; None if there is none."""
    first, end = bin_first_byte(index), bin_first_byte(index + 1)
    whole = RANK_GRAIN_BYTES * setting.num_ranks
    # The ladder's sizes double exactly, so one process walks many of them.
    tried = (*octave_ladder(first, end - 1, 4), -(-bin_center_bytes(index) // whole) * whole)
    return next((s for s in tried if size_bin(setting.benchmark_bytes(s)) == index), None)


def _each(values: Iterable[_T]) -> tuple[_T, ...]:
    return tuple(dict.fromkeys(values))
