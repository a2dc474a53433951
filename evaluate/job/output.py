"""What is said of a job: tables, a page, JSON, and the sweep of what is not covered."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.job.calls import Kind
from dynamiccl.evaluate.job.saved import BEST, POLICY, TABLE, Answer, Conclusion, Estimate
from dynamiccl.evaluate.page import write_page
from dynamiccl.sizes import bin_center_bytes, size_bin, size_label

_OWN: Final = "NCCL's own"
_ARMS: Final = {
    POLICY: "the policy",
    TABLE: "the best table",
    BEST: "the best config of each size, if it were known (no table exceeds it)",
}
#: Independent runs: enough for an interval of a few per cent (docs/evaluate.md).
_CYCLES: Final = 5
#: The most sizes; those that take most time come first.
_MOST_SIZES: Final = 24
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


def parts_of(found: Answer) -> list[TimeShare]:
    """The parts of the step; without steps, of communication."""
    job, whole, steps = found.job, found.job.whole_us or 1.0, found.job.steps
    asks = [k for k, kind in enumerate(job.kinds) if kind.asks]
    none = [k for k, kind in enumerate(job.kinds) if not kind.asks]
    asking, other = job.share_of(asks) * whole, job.share_of(none) * whole
    if steps is None:
        dark = job.share_of([*found.uncovered]) * whole
        told = [
            ("asks a tuner, and is covered", asking - dark, "asks"),
            ("asks a tuner, and is not covered", dark, "dark"),
            ("asks no tuner", other, "other"),
        ]
    else:
        asking, other = (share / whole * steps.step_us for share in (asking, other))
        whole = steps.step_us
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
        TimeShare("ABCDEF"[i], name, us, us / whole, look)
        for i, (name, us, look) in enumerate(told)
    ]


def asking(found: Answer) -> tuple[float, float]:
    """Shares of the bytes, and of the communication time, of calls that ask a tuner."""
    job, asks = found.job, np.array([kind.asks for kind in found.job.kinds])
    moved = job.of_kind(np.array([float(k.size_bytes) for k in job.kinds])[job.kind])
    whole = float(job.kind_us.sum())
    time = float(job.kind_us[asks].sum()) / whole if whole > 0.0 else 0.0
    return float(moved[asks].sum() / moved.sum()), time


def asking_text(found: Answer) -> str:
    """The shares of `asking` as text."""
    moved, time = asking(found)
    words = f" and {time:.0%} of its communication time" if found.job.has_times else ""
    return f"Calls with {moved:.0%} of the job's bytes{words} ask a tuner."


def lines_of(found: Answer) -> list[KindRow]:
    """All kinds of calls, largest share of time first."""
    job, arm, whole = found.job, found.deciding, found.job.whole_us or 1.0
    lines = [
        KindRow(
            kind,
            float(job.kind_us[k]) / whole,
            None if job.step_us is None else float(job.kind_exposed_us[k]) / whole,
            "" if k not in arm.configs else arm.configs[k] or _OWN,
            arm.calls.get(k),
            kind.why_not or arm.unknown.get(k, ""),
        )
        for k, kind in enumerate(job.kinds)
    ]
    return sorted(lines, key=lambda line: -line.time_share)


def sweep_for(found: Answer) -> Sweep | None:
    """The sweep that would measure what is not covered; None where not needed or possible."""
    kinds = [found.job.kinds[k] for k in found.uncovered]
    if not kinds and found.verdict is Conclusion.CANNOT_TELL:
        kinds = [kind for kind in found.job.kinds if kind.asks]
    able = [(k, k.num_nodes, k.num_ranks) for k in kinds if k.num_nodes and k.num_ranks]
    if not able:
        return None
    sizes = list(dict.fromkeys(_size(kind) for kind, _, _ in able))[:_MOST_SIZES]
    shapes = dict.fromkeys((nodes, ranks // nodes) for _, nodes, ranks in able)
    groups = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = {per} }}" for n, per in shapes)
    lines = [
        "# What a job calls and no sweep has measured, by dynamiccl-evaluate job.",
        f'name = "{slug(f"{found.system}-job")}"',
        f'system = "{slug(found.system)}"',
        f"collectives = [{_quoted(dict.fromkeys(kind.collective for kind, _, _ in able))}]",
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


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def to_json(found: Answer) -> dict[str, Any]:
    """The fields as plain data for `json.dumps`."""
    job, sweep, arms = found.job, sweep_for(found), found.arms.items()
    moved, time = asking(found)
    return {
        "verdict": found.verdict.value,
        "sentence": found.sentence,
        "share_is_of": "communication" if job.step_us is None else "step",
        "least": found.least,
        "system": found.system,
        "modelled": found.modelled,
        "nccl_version": found.nccl_version,
        "job_nccl_version": job.nccl_version,
        "sources": job.sources,
        "calls": sum(kind.calls for kind in job.kinds),
        "step": None if job.steps is None else asdict(job.steps),
        "parts": [asdict(part) for part in parts_of(found)],
        "asks_tuner_share": job.share_of([k for k, kind in enumerate(job.kinds) if kind.asks]),
        "asks_tuner_share_of_bytes": moved,
        "asks_tuner_share_of_communication": time,
        "not_covered_share": job.share_of([*found.uncovered]),
        "arms": {
            name: {
                "communication": asdict(arm.communication),
                "step": None if arm.step is None else asdict(arm.step),
                "given_back": None if arm.given_back is None else asdict(arm.given_back),
            }
            for name, arm in arms
        },
        "kinds": [
            {
                **asdict(line.kind),
                "time_share": line.time_share,
                "exposed_share": line.exposed_share,
                "better_config": line.config or None,
                "gain": None if line.gain is None else asdict(line.gain),
                "reason": line.reason,
            }
            for line in lines_of(found)
        ],
        "notes": found.notes,
        "sweep": None if sweep is None else sweep.text,
    }


def tables(found: Answer, rows: int | None = None) -> Iterator[TableBlock]:
    """Savings by arm, and the most important calls, at most `rows`."""
    has_steps = found.job.step_us is not None
    arms = []
    for name, arm in found.arms.items():
        told = [arm.communication, *([arm.step] if arm.step is not None else [])]
        is_known = len(arm.unknown) < sum(kind.asks for kind in found.job.kinds)
        texts = [each.text if is_known else "not known" for each in told]
        back = ["not known" if arm.given_back is None else arm.given_back.text] * has_steps
        arms.append([_ARMS[name], *texts, *back])
    heads = ["under", "of communication time"]
    heads += ["of step time", "of it by what compute gets back"] if has_steps else []
    yield TableBlock("Saved, with 90 % intervals", heads, arms)
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
            line.reason if line.gain is None else "-" if line.config == _OWN else line.gain.text,
        ]
        for line in lines_of(found)[:rows]
    ]
    heads = [
        *("collective", "size", "group", "nodes x ranks", "calls"),
        *(("of step", "exposed") if has_steps else ("of time",)),
        *("NCCL ran", "better", "calls save"),
    ]
    yield TableBlock("The calls that matter", heads, shown, layout="reasons")


def write(found: Answer, names: list[str], out: Path) -> Path:
    """Write page and JSON into `out`; returns the page's path."""
    sweep = sweep_for(found)
    gains = [line for line in lines_of(found) if line.gain is not None]
    gains.sort(key=lambda line: (line.kind.collective, line.shape, line.kind.size_bytes))
    low, high = ends = _ends([line.gain for line in gains if line.gain is not None])
    header = {
        "found": found,
        "names": names,
        "parts": parts_of(found),
        "asking": asking_text(found),
        "steps": found.job.steps,
        "gains": gains,
        "ends": ends,
        "at": lambda share: 2.0 + 96.0 * (share - low) / (high - low),
        "blocks": list(tables(found)),
        "sweep": None if sweep is None else sweep.text,
        "size_label": size_label,
    }
    return write_page(out, "job", to_json(found), [], header)


def _ends(gains: Sequence[Estimate]) -> tuple[float, float]:
    """Axis limits of gains: all intervals, and at least a little on both sides of 0."""
    low, high = min((g.low for g in gains), default=0.0), max((g.high for g in gains), default=0.0)
    margin = max(0.01, 0.05 * (max(high, 0.0) - min(low, 0.0)))
    return min(low, -margin), max(high, margin)
