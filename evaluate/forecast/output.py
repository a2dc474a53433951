"""Output of a forecast: sentences, tables, a page, JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.forecast.forecast import (
    BEST,
    POLICY,
    TABLE,
    Arm,
    Conclusion,
    Forecast,
    share_of,
)
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.evaluate.forecast.saving import Estimate, of_calls
from dynamiccl.evaluate.page import write_page
from dynamiccl.nccl import ABSTAIN
from dynamiccl.sizes import bin_center_bytes, size_bin, size_label

_OWN: Final = "NCCL's own"
_ARMS: Final = {
    POLICY: "the policy",
    TABLE: "the best table, cross-fitted",
    BEST: "the best config of each size, chosen and scored on the same runs (no table exceeds it)",
}

#: Independent runs: enough for an interval of a few per cent (docs/evaluate.md).
_CYCLES: Final = 5
#: The most sizes; those that take most time come first.
_MOST_SIZES: Final = 24
_T = TypeVar("_T")
_ALGORITHMS: Final = ("Ring", "Tree", "NVLS", "NVLSTree", "PAT")


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A part of the step, or of communication."""

    letter: str
    name: str
    us: float
    share: float
    #: How the page draws it: one of its classes.
    look: str


@dataclass(frozen=True, slots=True)
class KindRow:
    """A table row: one kind of call; shares are of the step, or of communication."""

    kind: Kind
    time_share: float
    exposed_share: float | None
    config: str
    #: Of the calls' own time; None: nothing is known, `reason` says why.
    gain: Estimate | None
    reason: str

    @property
    def shape(self) -> str:
        """Nodes x ranks per node, as far as known."""
        if self.kind.num_nodes is None or self.kind.num_ranks is None:
            return f"{self.kind.num_ranks or '?'} ranks"
        return f"{self.kind.num_nodes} x {self.kind.num_ranks // self.kind.num_nodes}"


def parts_of(found: Forecast) -> list[TimeShare]:
    """The parts of the step; without steps, of communication."""
    weighed = found.weighed
    asks = [k for k, kind in enumerate(weighed.kinds) if kind.asks]
    steps = weighed.job.steps
    if steps is None:
        whole = weighed.communication_us or 1.0
        asking = float(weighed.kind_us[asks].sum())
        dark = float(weighed.kind_us[[*found.uncovered]].sum())
        told = [
            ("asks a tuner, and is covered", asking - dark, "asks"),
            ("asks a tuner, and is not covered", dark, "dark"),
            ("asks no tuner", whole - asking, "other"),
        ]
    else:
        whole = steps.step_us
        none = [k for k, kind in enumerate(weighed.kinds) if not kind.asks]
        asking, other = (share_of(weighed, kinds) * whole for kinds in (asks, none))
        told = [
            # Compute covers what is hidden: the bar shows it once.
            ("compute alone", max(0.0, steps.compute_us - steps.hidden_us), "compute"),
            ("communication behind compute", steps.hidden_us, "hidden"),
            ("exposed communication that asks a tuner", asking, "asks"),
            ("exposed communication that asks none", other, "other"),
            ("waiting for other ranks", max(0.0, steps.exposed_us - asking - other), "dark"),
            ("idle", steps.idle_us, "idle"),
        ]
    return [
        TimeShare("ABCDEF"[i], name, us, us / whole if whole > 0.0 else 0.0, look)
        for i, (name, us, look) in enumerate(told)
    ]


def asking(found: Forecast) -> tuple[float, float]:
    """Shares of the bytes, and of the communication time, of calls that ask a tuner."""
    weighed = found.weighed
    asks = np.array([kind.asks for kind in weighed.kinds])
    calls = np.bincount(weighed.job.kind, weighed.job.weight, minlength=len(weighed.kinds))
    moved = calls * np.array([kind.size_bytes for kind in weighed.kinds])
    whole = weighed.communication_us
    time = float(weighed.kind_us[asks].sum()) / whole if whole > 0.0 else 0.0
    return float(moved[asks].sum() / moved.sum()), time


def asking_text(found: Forecast) -> str:
    """The shares of `asking` as text."""
    moved, time = asking(found)
    words = f" and {time:.0%} of its communication time" if found.is_timed else ""
    return f"Calls with {moved:.0%} of the job's bytes{words} ask a tuner."


def lines_of(found: Forecast) -> list[KindRow]:
    """All kinds of calls, largest share of time first."""
    weighed, arm = found.weighed, found.deciding
    whole = weighed.communication_us
    if weighed.job.step_us is not None:
        whole = float(weighed.job.step_us.sum())
    has_steps = weighed.job.step_us is not None
    lines = []
    for k, kind in enumerate(weighed.kinds):
        pick = arm.picks[k]
        gain = None if pick is None else of_calls(weighed, k, pick)
        config = "" if pick is None else pick.config.key
        lines.append(
            KindRow(
                kind,
                float(weighed.kind_us[k]) / whole if whole > 0.0 else 0.0,
                float(weighed.kind_exposed_us[k]) / whole if has_steps else None,
                _OWN if pick is not None and pick.config == ABSTAIN else config,
                gain,
                kind.why_not or arm.unknown.get(k, ""),
            )
        )
    return sorted(lines, key=lambda line: -line.time_share)


def sweep_for(found: Forecast) -> Sweep | None:
    """The sweep that would measure what is not covered; None where not needed or possible."""
    weighed = found.weighed
    kinds = [weighed.kinds[k] for k in found.uncovered]
    if not kinds and found.verdict is Conclusion.CANNOT_TELL:
        kinds = [kind for kind in weighed.kinds if kind.asks]
    return _covering_sweep(kinds, found.system)


def _covering_sweep(kinds: Sequence[Kind], system: str) -> Sweep | None:
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


def to_json(found: Forecast) -> dict[str, Any]:
    """The fields as plain data for `json.dumps`."""
    weighed = found.weighed
    asks = [k for k, kind in enumerate(weighed.kinds) if kind.asks]
    sweep = sweep_for(found)
    steps = weighed.job.steps
    return {
        "verdict": found.verdict.value,
        "sentence": found.sentence,
        "share_is_of": "communication" if weighed.job.step_us is None else "step",
        "least": found.least,
        "system": found.system,
        "modelled": found.modelled,
        "nccl_version": found.nccl_version,
        "job_nccl_version": weighed.job.nccl_version,
        "sources": weighed.job.sources,
        "calls": int(sum(kind.calls for kind in weighed.kinds)),
        "step": None if steps is None else asdict(steps),
        "parts": [asdict(part) for part in parts_of(found)],
        "asks_tuner_share": share_of(weighed, asks),
        "asks_tuner_share_of_bytes": asking(found)[0],
        "asks_tuner_share_of_communication": asking(found)[1],
        "not_covered_share": share_of(weighed, found.uncovered),
        "arms": {
            name: {
                "communication": asdict(arm.communication),
                "step": None if arm.step is None else asdict(arm.step),
            }
            for name, arm in found.arms.items()
        },
        "kinds": [_plain(line) for line in lines_of(found)],
        "notes": found.notes,
        "sweep": None if sweep is None else sweep.text,
    }


def _plain(line: KindRow) -> dict[str, Any]:
    kind = asdict(line.kind)
    return {
        **kind,
        "time_share": line.time_share,
        "exposed_share": line.exposed_share,
        "better_config": line.config or None,
        "gain": None if line.gain is None else asdict(line.gain),
        "reason": line.reason,
    }


def tables(found: Forecast, rows: int | None = None) -> Iterator[TableBlock]:
    """Savings by arm, and the most important calls, at most `rows`."""
    has_steps = found.weighed.job.step_us is not None
    heads = ["under", "of communication time", *(["of step time"] if has_steps else [])]
    arms = [
        [
            _ARMS[name],
            _arm_text(arm, arm.communication),
            *([_arm_text(arm, arm.step)] if arm.step is not None else []),
        ]
        for name, arm in found.arms.items()
    ]
    yield TableBlock("Saved, with 90 % intervals", heads, arms)
    whole = "step" if has_steps else "time"
    shown = [
        [
            line.kind.collective,
            size_label(line.kind.size_bytes),
            line.kind.group or "-",
            line.shape,
            str(line.kind.calls),
            f"{line.time_share:.1%}",
            *([f"{line.exposed_share:.1%}"] if line.exposed_share is not None else []),
            line.kind.ran or "-",
            line.config or "-",
            _gain_text(line),
        ]
        for line in lines_of(found)[:rows]
    ]
    heads = [
        "collective", "size", "group", "nodes x ranks", "calls", f"of {whole}",
        *(["exposed"] if has_steps else []), "NCCL ran", "better", "calls save",
    ]  # fmt: skip
    yield TableBlock("The calls that matter", heads, shown, layout="reasons")


def _arm_text(arm: Arm, told: Estimate) -> str:
    return told.text if any(pick is not None for pick in arm.picks) else "not known"


def _gain_text(line: KindRow) -> str:
    if line.gain is None:
        return line.reason
    return "-" if line.config == _OWN else line.gain.text


def write(found: Forecast, names: list[str], out: Path) -> Path:
    """Write page and JSON into `out`; returns the page's path."""
    sweep = sweep_for(found)
    lines = lines_of(found)
    gains = [line for line in lines if line.gain is not None]
    gains.sort(key=lambda line: (line.kind.collective, line.shape, line.kind.size_bytes))
    low, high = ends = _ends(gains)
    header = {
        "found": found,
        "names": names,
        "parts": parts_of(found),
        "asking": asking_text(found),
        "steps": found.weighed.job.steps,
        "gains": gains,
        "ends": ends,
        "at": lambda share: 2.0 + 96.0 * (share - low) / (high - low),
        "blocks": list(tables(found)),
        "sweep": None if sweep is None else sweep.text,
        "size_label": size_label,
    }
    return write_page(out, "forecast", to_json(found), [], header)


def _ends(lines: Sequence[KindRow]) -> tuple[float, float]:
    """Axis limits of gains: all intervals, and at least a little on both sides of 0."""
    gains = [line.gain for line in lines if line.gain is not None]
    low, high = min((g.low for g in gains), default=0.0), max((g.high for g in gains), default=0.0)
    margin = max(0.01, 0.05 * (max(high, 0.0) - min(low, 0.0)))
    return min(low, -margin), max(high, margin)
