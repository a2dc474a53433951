"""What is said of a job: as data, of which tables and a page are made, and the sweep it lacks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.collect.grid import RANK_GRAIN_BYTES
from dynamiccl.collect.sweep import SweepFile, parse_sweep, sweep_text
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.job.saved import ASKS, POLICY, TABLE, Answer, Estimate
from dynamiccl.evaluate.page import write_page
from dynamiccl.sizes import size_label

_OWN: Final = "NCCL's own"
_ARMS: Final = {POLICY: "the policy", TABLE: "the best table"}
_SAVED: Final = ("communication", "step", "given_back")
#: The most sizes; those that take most time come first.
_MOST_SIZES: Final = 24
_ALGORITHMS: Final = ("Ring", "Tree", "NVLS", "NVLSTree", "PAT")


def to_json(found: Answer) -> dict[str, Any]:
    """All that is said, as plain data; shares are of the step, without steps of communication."""
    job, arm = found.job, found.deciding
    arms: dict[str, dict[str, Any]] = {name: dict.fromkeys(_SAVED) for name in found.arms}
    for name, each in found.arms.items():
        told = {part: getattr(each, part) for part in _SAVED if each.configs}
        arms[name] |= {part: saved._asdict() for part, saved in told.items() if saved}
    kinds = [
        {
            **kind,
            "shape": _shape(**kind),
            "time_share": kind["time_us"] / (job.whole_us or 1.0),
            "exposed_share": None if job.step_us is None else job.share_of([k]),
            "better_config": (arm.configs[k] or _OWN) if k in arm.configs else None,
            "gain": arm.calls[k]._asdict() if k in arm.calls else None,
            "reason": kind["why_not"] or arm.unknown.get(k, ""),
        }
        for k, kind in enumerate(job.kinds.to_dicts())
    ]
    return {
        "verdict": found.verdict,
        "sentence": found.sentence,
        "share_is_of": "communication" if job.step_us is None else "step",
        "system": found.source.system,
        "modelled": found.source.is_modelled,
        "nccl_version": found.source.nccl_version,
        "job_nccl_version": job.nccl_version,
        "sources": job.sources,
        "calls": int(job.kinds["calls"].sum()),
        "step": job.steps,
        "parts": _parts(found),
        "asks_tuner_share": job.share_of(ASKS),
        "not_covered_share": job.share_of(list(arm.unknown)),
        "arms": arms,
        # Those of most time first; `gain` is of the calls' own time.
        "kinds": sorted(kinds, key=lambda kind: -kind["time_share"]),
        "notes": found.notes,
        "sweep": sweep_for(found),
    }


def _shape(num_nodes: int | None, num_ranks: int | None, **_: Any) -> str:
    """Nodes x ranks a node, as far as known."""
    if num_nodes is None or num_ranks is None:
        return f"{num_ranks or '?'} ranks"
    return f"{num_nodes} x {num_ranks // num_nodes}"


def _parts(found: Answer) -> list[dict[str, Any]]:
    """The parts of the step; without steps, of communication. `look` is a class of the page."""
    job, steps = found.job, found.job.steps
    asks, other = job.share_of(ASKS), job.share_of(~ASKS)
    if steps is None:
        dark = job.share_of(list(found.deciding.unknown))
        told = [
            ("asks a tuner, and is covered", asks - dark, "asks"),
            ("asks a tuner, and is not covered", dark, "dark"),
            ("asks no tuner", other, "other"),
        ]
    else:
        compute, hidden, exposed, idle = (
            steps[f"{part}_us"] / steps["step_us"]
            for part in ("compute", "hidden", "exposed", "idle")
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
    whole_us = job.whole_us if steps is None else steps["step_us"]
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


def sweep_for(found: Answer) -> str | None:
    """The sweep that would measure what is not covered; None where not needed or possible."""
    kinds = found.job.kinds[list(found.deciding.unknown)]
    if kinds.is_empty() and found.verdict == "cannot-tell":
        kinds = found.job.kinds.filter(ASKS)
    kinds = kinds.drop_nulls(["num_nodes", "num_ranks"])
    if kinds.is_empty():
        return None
    # Whole shares of ranks: nccl-tests runs no others.
    grain = RANK_GRAIN_BYTES * pl.col("num_ranks")
    size = ((pl.col("size_bytes") / grain).round().clip(1) * grain).cast(pl.Int64)
    sizes = kinds.select(size).to_series().unique(maintain_order=True).head(_MOST_SIZES)
    per_node = pl.col("num_ranks") // pl.col("num_nodes")
    shapes = kinds.select("num_nodes", ranks_per_node=per_node).unique(maintain_order=True)
    file = SweepFile.model_validate(
        {
            "name": slug(f"{found.source.system}-job"),
            "system": slug(found.source.system),
            "collectives": kinds["collective"].unique(maintain_order=True).to_list(),
            "groups": shapes.to_dicts(),
            "sizes": {"list": sizes.sort().to_list()},
            "algorithms": _ALGORITHMS,
        }
    )
    head = "What a job calls and no sweep has measured, by dynamiccl-evaluate job."
    return parse_sweep(sweep_text(file, head=head), where="the sweep for this job").text


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
    header = {
        "told": told,
        "names": names,
        "gains": gains,
        "blocks": list(tables(told)),
        "size_label": size_label,
        "text_of": text_of,
    }
    page = write_page(out, "job", told, [], header)
    if told["sweep"] is not None:
        (out / "cover.toml").write_text(told["sweep"], encoding="utf-8")
    return page
