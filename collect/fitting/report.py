"""Report of a fit: held-out errors by size class and by config, beside the repeat noise."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from dynamiccl.collect.fitting.fit import Fit, HeldOut
from dynamiccl.collect.fitting.problem import LARGE_BYTES

#: Upper ends of the size classes, and their names.
_CLASSES: Final = (
    (64 << 10, "to 64 KiB"),
    (1 << 20, "to 1 MiB"),
    (16 << 20, "to 16 MiB"),
    (256 << 20, "to 256 MiB"),
    (1 << 62, "above 256 MiB"),
)
#: What a fit is to reach above 1 MiB, and by how much noise may raise it.
BAR_MEDIAN: Final = 0.05
BAR_P90: Final = 0.15


@dataclass(frozen=True, slots=True)
class Errors:
    """Statistics of relative errors of some held-out cells; 0.05 = 5 %."""

    cells: int
    median: float
    p90: float
    #: Median over the cells with repeats: by how much two repeats differ. None without any.
    noise: float | None


def errors_of(held_out: Sequence[HeldOut]) -> Errors | None:
    """The errors of some cells; None without any."""
    if not held_out:
        return None
    sizes = np.abs([one.error for one in held_out])
    spreads = [s for one in held_out if (s := one.item.cell.spread) is not None]
    return Errors(
        cells=len(held_out),
        median=float(np.median(sizes)),
        p90=float(np.quantile(sizes, 0.9)),
        noise=float(np.median(spreads)) if spreads else None,
    )


def size_class(size_bytes: int) -> str:
    """Name of a size's class.

    >>> size_class(1 << 20), size_class((1 << 20) + 4)
    ('to 1 MiB', 'to 16 MiB')
    """
    return next(name for end, name in _CLASSES if size_bytes <= end)


def by_size(fit: Fit) -> dict[str, Errors]:
    """Errors by size class."""
    return _grouped(fit.held_out, lambda one: size_class(one.item.cell.call.size_bytes))


def by_config(fit: Fit) -> dict[str, Errors]:
    """Errors above 1 MiB by requested config."""
    return _grouped(large(fit), lambda one: one.item.cell.label)


def by_physics(fit: Fit) -> dict[str, Errors]:
    """Errors above 1 MiB by the algorithm and protocol that ran."""
    return _grouped(large(fit), lambda one: one.item.key)


def large(fit: Fit) -> list[HeldOut]:
    """Held-out cells above 1 MiB, to which the targets apply."""
    return [one for one in fit.held_out if one.item.cell.call.size_bytes > LARGE_BYTES]


def misses(fit: Fit) -> list[str]:
    """The targets that are missed, as lines of text; empty when all are met."""
    errors = errors_of(large(fit))
    if errors is None:
        return ["no cell above 1 MiB was held out"]
    noise = errors.noise or 0.0
    bars = (
        ("median", errors.median, max(BAR_MEDIAN, noise)),
        ("90th percentile", errors.p90, max(BAR_P90, 2 * noise)),
    )
    return [
        f"{name} error {value:.1%} is above the bar of {bar:.1%}"
        for name, value, bar in bars
        if value > bar
    ]


def worst(fit: Fit, count: int = 10) -> list[HeldOut]:
    """The cells above 1 MiB with the largest errors."""
    return sorted(large(fit), key=lambda one: -abs(np.log1p(one.error)))[:count]


def to_json(fit: Fit) -> dict[str, Any]:
    """The report as a JSON document."""

    def document(errors: Errors | None) -> dict[str, Any] | None:
        return None if errors is None else asdict(errors)

    return {
        "system": fit.file.name,
        "held_out_above_1mib": document(errors_of(large(fit))),
        "misses": misses(fit),
        "by_size": {name: document(errors) for name, errors in by_size(fit).items()},
        "by_config": {name: document(errors) for name, errors in by_config(fit).items()},
        "by_physics": {name: document(errors) for name, errors in by_physics(fit).items()},
        "worst": [
            {
                "config": one.item.cell.label,
                "runs": one.item.key,
                "num_channels": one.item.work.num_channels,
                "size_bytes": one.item.cell.call.size_bytes,
                "measured_us": one.item.cell.time_us,
                "predicted_us": one.predicted_us,
            }
            for one in worst(fit)
        ],
        "left_out": fit.left_out,
        "at_bound": list(fit.at_bound),
    }


def _grouped(held_out: Iterable[HeldOut], name: Callable[[HeldOut], str]) -> dict[str, Errors]:
    groups: dict[str, list[HeldOut]] = {}
    for one in held_out:
        groups.setdefault(name(one), []).append(one)
    found = {key: errors_of(group) for key, group in groups.items()}
    return {key: errors for key, errors in found.items() if errors is not None}
