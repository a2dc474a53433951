"""The sweep that would measure the calls that a forecast does not cover."""

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.sizes import bin_center_bytes, size_bin

#: Independent runs: enough for an interval of a few per cent (docs/evaluate.md).
_CYCLES: Final = 5
#: The most sizes; those that take most time come first.
_MOST_SIZES: Final = 24
_T = TypeVar("_T")
_ALGORITHMS: Final = ("Ring", "Tree", "NVLS", "NVLSTree", "PAT")


def covering_sweep(kinds: Sequence[Kind], system: str) -> Sweep | None:
    """A sweep of these kinds of calls, most important first; None where none has a shape."""
    able = [k for k in kinds if k.num_nodes is not None and k.num_ranks is not None]
    if not able:
        return None
    sizes = list(dict.fromkeys(_size(kind) for kind in able))[:_MOST_SIZES]
    shapes = _once((k.num_nodes or 1, (k.num_ranks or 1) // (k.num_nodes or 1)) for k in able)
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = {per} }}" for n, per in shapes)
    lines = [
        "# What a job calls and no sweep has measured, by dynamiccl-evaluate forecast.",
        f'name = "{slug(f"{system}-job")}"',
        f'system = "{slug(system)}"',
        f"collectives = [{_quoted(_once(kind.collective for kind in able))}]",
        f"groups = [{groups}]",
        f"sizes = {{ list = [{', '.join(str(size) for size in sorted(sizes))}] }}",
        f"algorithms = [{_quoted(_ALGORITHMS)}]",
        f"cycles = {_CYCLES}",
    ]
    return parse_sweep("\n".join(lines) + "\n", where="the sweep for this job")


def _size(kind: Kind) -> int:
    """A size of the kind's bin that is whole shares of its ranks."""
    whole = RANK_GRAIN_BYTES * (kind.num_ranks or 1)
    for size in (kind.size_bytes, bin_center_bytes(kind.bin)):
        rounded = max(whole, round(size / whole) * whole)
        if size_bin(rounded) == kind.bin:
            return rounded
    return max(whole, kind.size_bytes)


def _once(values: Iterable[_T]) -> list[_T]:
    return list(dict.fromkeys(values))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
