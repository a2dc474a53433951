"""The report: score policies on the test bins, write results.parquet, summary.json and a page.

Figures are of one frame, a row per task and policy (`metrics.result_rows`), and of one row per
policy (`metrics.summarise`); the templates report.* make page, terminal and sentences of them.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import (
    TaskGrid,
    left_out_text,
    noise_bands,
    quiet,
    rows_left_out,
    run_names,
    task_grid,
    tuned,
    usable,
)
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import content_hash, part_paths, provenance_of, read, slug
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.baselines import make_policies
from dynamiccl.evaluate.blocks import FigureBlock
from dynamiccl.evaluate.figures.drawing import draw_changes, draw_gains, draw_map
from dynamiccl.evaluate.gate.gated import read_gated
from dynamiccl.evaluate.gate.report_blocks import gate_blocks
from dynamiccl.evaluate.metrics import SCALE, result_rows, summarise
from dynamiccl.evaluate.ope import CONFIDENCE, logged_values
from dynamiccl.evaluate.page import render, say
from dynamiccl.evaluate.policies import Actions, LearnedPolicy, probes_of
from dynamiccl.nccl import ABSTAIN
from dynamiccl.train.policy import TorchPolicy

SUMMARY_NAME: Final = "summary.json"
NO_RUNS: Final[Mapping[str, str]] = MappingProxyType({})
#: Every figure of the page as a file of its own, below the report.
FIGURES_FOLDER: Final = "figures"


@dataclass(frozen=True, slots=True)
class Report:
    """What a report found, and where its files lie."""

    #: What summary.json holds.
    told: dict[str, Any]
    results: Path
    page: Path
    #: Of the data that were scored.
    data_hash: str

    @property
    def files(self) -> list[Path]:
        """The page, its figures and the summary."""
        folder = self.page.parent
        return [self.page, folder / SUMMARY_NAME, folder / FIGURES_FOLDER]


def make_report(
    data_dir: Path,
    policies: Sequence[tuple[str, Path]],
    out: Path,
    runs: Mapping[str, str] = NO_RUNS,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Score `policies` (name, policy directory) and the baselines on the test tasks of a data set.

    What is for test is what the policies were neither trained nor validated on; UserError where
    they differ in that. `runs` are the ids of runs by name of a policy; `progress` is told of
    policies done, and of all. Raises what reading data and policies raises, and NotEnoughData when
    no task can be scored.
    """
    learned = [(name, TorchPolicy.load(path)) for name, path in policies]
    names = [name for name, _ in policies]
    everything = read(data_dir)
    parts = _parts({name: policy.manifest.parts for name, policy in learned}, everything)
    frame = parts.assign(tuned(everything))
    catalogue, left_out = Catalogue.from_frame(usable(frame)), rows_left_out(everything)
    test = task_grid(frame, catalogue, [Split.TEST])
    if test.tasks.is_empty():
        raise NotEnoughData(
            f"{data_dir} has no test task to score: none of {test.unscored.height} tasks that are "
            f"held out for it ({parts.text()}) has the default and two forced configs measured; "
            f"rows in no task: {left_out_text(left_out)}"
        )
    training = task_grid(frame, catalogue, [Split.TRAIN])
    validation = task_grid(frame, catalogue, [Split.VALIDATION])
    players = make_policies(training, validation, catalogue, learned)
    choices, probes = {}, {}
    for done, player in enumerate(players):
        progress(done, len(players))
        choices[player.name] = player.choose(test)
        probes[player.name] = probes_of(player, test)
    bands = {str(name): float(band) for name, band, _ in noise_bands(quiet(frame)).iter_rows()}
    results = result_rows(test, catalogue, choices, bands)
    free = [LearnedPolicy(policy, catalogue, name) for name, policy in learned]
    logged = logged_values(frame, catalogue, test, free)
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    systems = {}
    for system in test.tasks["system"].unique().sort():
        mine, band = results.filter(system=system), bands.get(system)
        for name in names:
            facts[name].append(facts_of(mine.filter(policy=name), band))
        sentences = {name: say("report", "sentence", facts[name][-1]) for name in names}
        scores = _scores(system, test, choices, probes, band)
        systems[str(system)] = {
            "simulated": bool(mine["simulated"].all()),
            "noise_band": band,
            "tasks_unscored": test.unscored.filter(system=system).height,
            **scores,
            "sentences": sentences,
            "verdicts": [verdict_of(name, scores["policies"], names, band) for name in names],
            "logged": logged.get(system, {}),
        }
    out.mkdir(parents=True, exist_ok=True)
    page = out / "report.html"
    told = {
        "headline": say("report", "headline", facts),
        "systems": systems,
        "rows_left_out": left_out,
        "results": str(out / "results.parquet"),
        "page": str(page),
    }
    results.write_parquet(out / "results.parquet")
    whole = task_grid(frame, catalogue, list(Split))
    offline = [player for player in players if not probes[player.name].any()]
    drawn = result_rows(whole, catalogue, {p.name: p.choose(whole) for p in offline}, bands)
    origins = {name: f"run {runs[name]}" if name in runs else str(path) for name, path in policies}
    for name, policy in learned:
        origins[name] += f", {policy.manifest.slack.promise}" if policy.manifest.slack else ""
    gates = [(name, gated) for name, path in policies if (gated := read_gated(path)) is not None]
    header = {
        **told,
        "names": names,
        "drawn": {system: _draw(drawn, system, names, systems[system]) for system in systems},
        "changes": [_change(drawn, s, names[0], other) for other in names[1:] for s in systems],
        "unscored": {
            system: test.unscored.filter(system=system)
            .group_by("unscored", "collective", maintain_order=True)
            .len()
            .rows()
            for system in systems
        },
        "blocks": [block for name, gated in gates for block in gate_blocks(name, gated)],
        "confidence": CONFIDENCE,
        "policies": origins,
        **_sources(data_dir, everything),
        "learned": {name: _origin(policy.manifest) for name, policy in learned},
        "commit": _commit_text,
    }
    page.write_text(render("report.html", header), encoding="utf-8")
    _write_figures(header, out / FIGURES_FOLDER)
    (out / SUMMARY_NAME).write_text(json.dumps(told, indent=1), encoding="utf-8")
    return Report(told, out / "results.parquet", page, header["data_hash"])


def mean_over_turns(
    reports: Sequence[Report], recipes: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Mean and largest of the mean regrets of turns and their systems; of ours by recipe."""
    found: dict[str, list[float]] = {}
    for system in [each for report in reports for each in report.told["systems"].values()]:
        for name, each in system["policies"].items():
            found.setdefault(recipes.get(name, name), []).append(each["mean"])
    return {name: {"mean": float(np.mean(each)), "most": max(each)} for name, each in found.items()}


def _parts(learned: Mapping[str, Splits], frame: pl.DataFrame) -> Splits:
    """How the data are split: as the policies had them."""
    for (first, found), (name, other) in pairwise(learned.items()):
        if other != found:
            raise UserError(
                f"{first} and {name} were trained on other parts of the data (split={found.by} and "
                f"split={other.by}), so that what is new to one is not to the other: report on "
                "them one by one"
            )
    return next(iter(learned.values()), None) or Splits.of(tuned(usable(frame)))


def _scores(
    system: str,
    grid: TaskGrid,
    choices: Mapping[str, Actions],
    probes: Mapping[str, Actions],
    band: float | None,
) -> dict[str, Any]:
    """Summaries by policy: of all tasks, by collective, and where NCCL's own choice is not best."""
    tasks = grid.tasks.with_row_index("row").filter(system=system)

    def of(part: pl.DataFrame) -> dict[str, dict[str, Any]]:
        rows = part["row"].to_numpy().astype(np.int64)
        found = summarise(grid, rows, choices, band, probes).to_dicts()
        return {each["policy"]: each for each in found}

    regret = pl.Series(grid.regret(choices["nccl-default"]))[tasks["row"]]
    beyond = tasks.filter(regret > band) if band is not None else tasks.head(0)
    collectives = tasks.group_by("collective", maintain_order=True)
    return {
        "policies": of(tasks),
        "by_collective": {str(name): of(part) for (name,), part in collectives},
        # Elsewhere anything looks good. Empty, too, where the band is not known.
        "beyond_noise": of(beyond) if beyond.height else {},
    }


def facts_of(mine: pl.DataFrame, band: float | None) -> dict[str, Any]:
    """Where a policy is faster than NCCL's own choice, and where slower, beyond the noise.

    `mine`: its `result_rows` of one system. Group shapes of a size count together: it is faster if
    one is, and none slower. Of sizes at which it is neither: whether it acts, and the most that a
    measured config would save.
    """
    # Faster: NCCL's own / time - 1 over the band. Slower: time / NCCL's own - 1 over it.
    least = band or 0.0
    enough = least / (1.0 + least)
    sizes = (
        mine.group_by("collective", "size_bytes", maintain_order=True)
        .agg(
            most=pl.col("gain").max(),
            worst=pl.col("gain").min(),
            acts=(pl.col("chosen_config") != ABSTAIN.key).any(),
            saved=(1.0 - pl.col("oracle_us") / pl.col("default_us")).max(),
        )
        .with_columns(slower=pl.col("acts") & (pl.col("worst") < -least))
        .with_columns(faster=pl.col("acts") & (pl.col("most") > enough) & ~pl.col("slower"))
    )
    gains: list[dict[str, Any]] = []
    losses: list[dict[str, Any]] = []
    for (collective,), unsorted in sizes.group_by("collective", maintain_order=True):
        part = unsorted.sort("size_bytes")
        for told, chosen, most in (
            (gains, part["faster"], part["most"]),
            (losses, part["slower"], -part["worst"]),
        ):
            if chosen.any():
                runs = groupby(zip(part["size_bytes"], chosen, strict=True), key=lambda at: at[1])
                ranges = [[size for size, _ in run] for is_one, run in runs if is_one]
                told.append(
                    {
                        "collective": collective,
                        "ranges": [(run[0], run[-1]) for run in ranges],
                        "count": int(chosen.sum()),
                        "of": part.height,
                        "most": most.filter(chosen).max(),
                    }
                )
    kept = sizes.filter(~pl.col("faster") & ~pl.col("slower"))
    possible = sizes.filter(pl.col("saved") > enough).sort("saved", descending=True)
    return {
        "gains": gains,
        "losses": losses,
        "kept": kept.height > 0,
        "acts": bool(kept["acts"].any()),
        "possible": next(iter(possible.to_dicts()), None),
        "noise_known": band is not None,
    }


def _simple(scores: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Summaries of baselines with no more information than a policy, the best first.

    Excluded are the search, which measures the test task, the oracle, which knows it, and random
    choices.
    """
    others = [s for s in scores.values() if s["probes"] == 0.0]
    simple = [s for s in others if s["policy"] not in {*names, *SCALE}]
    return sorted(simple, key=lambda each: -each["gain"])


def verdict_of(
    name: str, scores: Mapping[str, Any], names: Sequence[str], band: float | None
) -> str:
    """One sentence: is a policy worth more than the simple tables and regressions?"""
    gain, simple = scores[name]["gain"], _simple(scores, names)
    facts = {
        "name": name,
        "gain": gain,
        "best": simple[0],
        "better": simple[0]["gain"] > gain,
        "by_far": sum(each["gain"] > gain + (band or 0.0) for each in simple),
        "of": len(simple),
        "noise_known": band is not None,
    }
    return say("report", "verdict", facts)


def _draw(
    drawn: pl.DataFrame, system: str, names: Sequence[str], found: Mapping[str, Any]
) -> dict[str, Any]:
    mine = drawn.filter(system=system)
    best = _simple(found["policies"], names)[0]["policy"]
    return {
        "map": draw_map(mine, names),
        "gains": draw_gains(mine, names, best, found["noise_band"]),
    }


def _change(drawn: pl.DataFrame, system: str, before: str, after: str) -> dict[str, Any]:
    """What would change on a system if another policy than the first were promoted."""
    mine = drawn.filter(system=system)
    svg, tasks = draw_changes(mine.filter(policy=before), mine.filter(policy=after))
    named = {"system": system, "before": before, "after": after}
    return {**named, "svg": svg, "tasks": tasks.to_dicts()}


def _sources(data_dir: Path, frame: pl.DataFrame) -> dict[str, Any]:
    """Where the data come from: files, sweeps, writers."""
    key = ["system", "sweep", "source"]
    day = pl.col("timestamp").dt.date()
    shape = pl.concat_str("num_nodes", pl.lit(" x "), "ranks_per_node")
    listed = {name: pl.col(name) for name in ("gpu", "nccl_version", "collective")}
    found = frame.group_by(key).agg(
        rows=pl.len(),
        runs=pl.col("run").n_unique(),
        sizes=pl.col("size_bytes").n_unique(),
        first=day.min(),
        last=day.max(),
        shapes=shape.drop_nulls().unique().sort(),
        **{name: each.drop_nulls().unique().sort() for name, each in listed.items()},
    )
    timed = usable(frame).group_by(key).agg(timed=pl.len())
    found = found.join(timed, on=key, how="left").with_columns(pl.col("timed").fill_null(0))
    keys = ("tool", "dynamiccl_version", "python", "host", "git_commit", "files")
    writers = [{name: each.get(name) for name in keys} for each in provenance_of(data_dir)]
    return {
        "data": str(data_dir),
        "data_hash": content_hash(data_dir),
        "files": len(part_paths(data_dir)),
        "rows": frame.height,
        "runs": sorted(set(run_names(usable(frame)))),
        "sources": found.sort(key).to_dicts(),
        "writers": [each for index, each in enumerate(writers) if each not in writers[:index]],
    }


def _origin(manifest: Manifest) -> dict[str, Any]:
    """Where a policy comes from."""
    return {
        "recipe": manifest.recipe,
        "created": manifest.created,
        "release": manifest.dynamiccl_version,
        "commit": manifest.git_commit,
        "data_hash": manifest.data_hash,
        "runs": manifest.runs,
        "actions": len(manifest.catalogue),
        "margin": manifest.abstain_margin,
        "gated": any(support.gated is not None for support in manifest.supports),
    }


def _commit_text(commit: str | None) -> str:
    """Abbreviated commit, and whether the source was modified."""
    digest, plus, changed = (commit or "not known").partition("+")
    return digest[:12] + plus + changed


def _write_figures(header: Mapping[str, Any], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # those of an earlier report
    folder.mkdir()
    found = {
        f"{slug(system)}-{kind}": svg
        for system, figures in header["drawn"].items()
        for kind, svg in figures.items()
    }
    for each in header["changes"]:
        if each["tasks"]:
            name = "-".join(slug(each[part]) for part in ("system", "before", "after"))
            found[f"changes-{name}"] = each["svg"]
    found |= {block.name: block.svg for block in header["blocks"] if isinstance(block, FigureBlock)}
    for name, svg in found.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
