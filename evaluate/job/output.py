"""What is said of a job: as data, of which tables and a page are made, and the sweep it lacks."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.collect.sweep import Sweep, SweepFile, parse_sweep, sweep_text
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.job.saved import POLICY, TABLE, Answer, Conclusion, Estimate
from dynamiccl.evaluate.page import write_page
from dynamiccl.sizes import size_label

_OWN: Final = "NCCL's own"
_ARMS: Final = {POLICY: "the policy", TABLE: "the best table"}
_PARTS: Final = ("communication", "step", "given_back")
#: The most sizes; those that take most time come first.
_MOST_SIZES: Final = 24
_ALGORITHMS: Final = ("Ring", "Tree", "NVLS", "NVLSTree", "PAT")


def to_json(found: Answer) -> dict[str, Any]:
    """All that is said, as plain data; shares are of the step, without steps of communication."""
    job, sweep = found.job, sweep_for(found)
    asks = np.array([kind.asks for kind in job.kinds])
    moved = job.of_kind(pl.lit(1.0)) * [kind.size_bytes for kind in job.kinds]
    whole_us = float(job.kind_us.sum())
    asks_us = float(job.kind_us[asks].sum()) / whole_us if whole_us > 0.0 else 0.0
    return {
        "verdict": found.verdict.value,
        "sentence": found.sentence,
        "share_is_of": "communication" if job.step_us is None else "step",
        "least": found.least,
        "system": found.source.system,
        "modelled": found.source.is_modelled,
        "nccl_version": found.source.nccl_version,
        "job_nccl_version": job.nccl_version,
        "sources": job.sources,
        "calls": sum(kind.calls for kind in job.kinds),
        "step": job.steps,
        "parts": _parts(found),
        "asks_tuner_share": job.share_of(np.flatnonzero(asks).tolist()),
        "asks_tuner_share_of_bytes": float(moved[asks].sum() / moved.sum()),
        "asks_tuner_share_of_communication": asks_us if job.has_times else None,
        "not_covered_share": job.share_of(found.uncovered),
        "arms": {
            name: {part: asdict(arm)[part] if arm.configs else None for part in _PARTS}
            for name, arm in found.arms.items()
        },
        "kinds": _kinds(found),
        "notes": found.notes,
        "sweep": None if sweep is None else sweep.text,
    }


def _parts(found: Answer) -> list[dict[str, Any]]:
    """The parts of the step; without steps, of communication. `look` is a class of the page."""
    job, steps = found.job, found.job.steps
    asks, other = (
        job.share_of([k for k, kind in enumerate(job.kinds) if kind.asks is is_asked])
        for is_asked in (True, False)
    )
    if steps is None:
        whole_us, dark = job.whole_us, job.share_of(found.uncovered)
        told = [
            ("asks a tuner, and is covered", asks - dark, "asks"),
            ("asks a tuner, and is not covered", dark, "dark"),
            ("asks no tuner", other, "other"),
        ]
    else:
        whole_us = steps["step_us"]
        compute, hidden, exposed, idle = (
            steps[f"{part}_us"] / whole_us for part in ("compute", "hidden", "exposed", "idle")
        )
        told = [
            # Compute covers what is hidden: the bar shows it once.
            ("compute alone", max(0.0, compute - hidden), "compute"),
            ("communication behind compute", hidden, "hidden"),
            ("exposed communication that asks a tuner", asks, "asks"),
            ("exposed communication that asks none", other, "other"),
            ("waiting for other ranks", max(0.0, exposed - asks - other), "dark"),
            ("idle", idle, "idle"),
        ]
    return [
        {
            "letter": letter,
            "name": name,
            "us": share * whole_us if job.has_times else None,
            "share": share,
            "look": look,
        }
        for letter, (name, share, look) in zip("ABCDEF", told, strict=False)
    ]


def _kinds(found: Answer) -> list[dict[str, Any]]:
    """All kinds of calls, largest share of time first; `gain` is of the calls' own time."""
    job, arm, whole_us = found.job, found.deciding, found.job.whole_us or 1.0
    rows = [
        {
            **asdict(kind),
            "asks": kind.asks,
            "shape": kind.shape,
            "time_share": float(job.kind_us[k]) / whole_us,
            "exposed_share": None if job.step_us is None else job.share_of([k]),
            "better_config": (arm.configs[k] or _OWN) if k in arm.configs else None,
            "gain": asdict(arm.calls[k]) if k in arm.calls else None,
            "reason": kind.why_not or arm.unknown.get(k, ""),
        }
        for k, kind in enumerate(job.kinds)
    ]
    return sorted(rows, key=lambda row: -row["time_share"])


def sweep_for(found: Answer) -> Sweep | None:
    """The sweep that would measure what is not covered; None where not needed or possible."""
    kinds = [found.job.kinds[k] for k in found.uncovered]
    if not kinds and found.verdict is Conclusion.CANNOT_TELL:
        kinds = [kind for kind in found.job.kinds if kind.asks]
    able = [(k, k.num_nodes, k.num_ranks) for k in kinds if k.num_nodes and k.num_ranks]
    if not able:
        return None
    shapes = dict.fromkeys((nodes, ranks // nodes) for _, nodes, ranks in able)
    # Whole shares of ranks: nccl-tests runs no others.
    grains = [(kind.size_bytes, RANK_GRAIN_BYTES * ranks) for kind, _, ranks in able]
    sizes = dict.fromkeys(max(1, round(size / grain)) * grain for size, grain in grains)
    file = SweepFile.model_validate(
        {
            "name": slug(f"{found.source.system}-job"),
            "system": slug(found.source.system),
            "collectives": list(dict.fromkeys(kind.collective for kind, _, _ in able)),
            "groups": [{"num_nodes": n, "ranks_per_node": per} for n, per in shapes],
            "sizes": {"list": sorted([*sizes][:_MOST_SIZES])},
            "algorithms": _ALGORITHMS,
        }
    )
    head = "What a job calls and no sweep has measured, by dynamiccl-evaluate job."
    return parse_sweep(sweep_text(file, head=head), where="the sweep for this job")


def asking_text(told: dict[str, Any]) -> str:
    """What share of a job asks a tuner, of what `to_json` says."""
    moved, time = told["asks_tuner_share_of_bytes"], told["asks_tuner_share_of_communication"]
    words = "" if time is None else f" and {time:.0%} of its communication time"
    return f"Calls with {moved:.0%} of the job's bytes{words} ask a tuner."


def tables(told: dict[str, Any], rows: int | None = None) -> Iterator[TableBlock]:
    """Savings by arm, and the most important calls, at most `rows`, of what `to_json` says."""
    has_steps = told["share_is_of"] == "step"
    heads = {"communication": "of communication time"}
    if has_steps:
        heads |= {"step": "of step time", "given_back": "of it by what compute gets back"}
    arms = [
        [_ARMS[name], *(text_of(arm[key]) or "not known" for key in heads)]
        for name, arm in told["arms"].items()
    ]
    yield TableBlock("Saved, with 90 % intervals", ["under", *heads.values()], arms)
    shown = [
        [
            row["collective"],
            size_label(row["size_bytes"]),
            row["group"] or "-",
            row["shape"],
            str(row["calls"]),
            f"{row['time_share']:.1%}",
            *([f"{row['exposed_share']:.1%}"] if has_steps else []),
            row["ran"] or "-",
            row["better_config"] or "-",
            "-" if row["better_config"] == _OWN else text_of(row["gain"]) or row["reason"],
        ]
        for row in told["kinds"][:rows]
    ]
    columns = [
        *("collective", "size", "group", "nodes x ranks", "calls"),
        *(("of step", "exposed") if has_steps else ("of time",)),
        *("NCCL ran", "better", "calls save"),
    ]
    yield TableBlock("The calls that matter", columns, shown, layout="reasons")


def text_of(estimate: dict[str, float] | None) -> str:
    """An estimate of `to_json` as text; empty for None."""
    return "" if estimate is None else Estimate(**estimate).text


def write(told: dict[str, Any], names: list[str], out: Path) -> Path:
    """Write page, JSON and sweep of what `to_json` says into `out`; returns the page's path."""
    gains = [row for row in told["kinds"] if row["gain"] is not None]
    gains.sort(key=lambda row: (row["collective"], row["shape"], row["size_bytes"]))
    # The axis has all intervals, and at least a little on both sides of 0.
    low = min((row["gain"]["low"] for row in gains), default=0.0)
    high = max((row["gain"]["high"] for row in gains), default=0.0)
    margin = max(0.01, 0.05 * (max(high, 0.0) - min(low, 0.0)))
    low, high = ends = min(low, -margin), max(high, margin)
    header = {
        "told": told,
        "names": names,
        "asking": asking_text(told),
        "gains": gains,
        "ends": ends,
        "at": lambda share: 2.0 + 96.0 * (share - low) / (high - low),
        "blocks": list(tables(told)),
        "size_label": size_label,
        "text_of": text_of,
    }
    page = write_page(out, "job", told, [], header)
    if told["sweep"] is not None:
        (out / "cover.toml").write_text(told["sweep"], encoding="utf-8")
    return page
