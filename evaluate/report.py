"""The report: score policies on the test bins, write results.parquet, summary.json and a page."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.datasets import cells
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import content_hash, part_paths, provenance_of, read, slug
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.baselines import Actions, LearnedPolicy, NamedPolicy, make_policies
from dynamiccl.evaluate.metrics import CONFIDENCE, SCALE, logged_values, result_rows, summarise
from dynamiccl.evaluate.page import draw_gains, draw_map, render, say
from dynamiccl.nccl import ABSTAIN
from dynamiccl.serve.artifact import channels_unread
from dynamiccl.train import tracking, tracking_uri
from dynamiccl.train.policy import TorchPolicy

SUMMARY_NAME: Final = "summary.json"
FIGURES_FOLDER: Final = "figures"


def make_report(
    data_dir: Path,
    policies: Sequence[tuple[str, Path]],
    out: Path,
    runs: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> dict[str, Any]:
    """Score `policies` (name, policy directory) and the baselines on the test tasks of a data set.

    The content of summary.json; page and figures are kept in `runs` (by name), too, under
    `report/HASH`. Raises UserError where policies differ in their training parts and for an unknown
    run, NotEnoughData when no task can be scored, and as `TorchPolicy.load` and the readers.
    `progress`: policies done, and all.
    """
    learned = [(name, TorchPolicy.load(path, judged=True)) for name, path in policies]
    names = [name for name, _ in policies]
    everything = read(data_dir)
    parts = _parts({name: policy.manifest.parts for name, policy in learned}, everything)
    frame = parts.assign(cells.tuned(everything))
    catalogue, left_out = Catalogue.from_frame(cells.usable(frame)), cells.rows_left_out(everything)
    test = cells.task_grid(frame, catalogue, [Split.TEST])
    if test.tasks.is_empty():
        raise NotEnoughData(
            f"{data_dir} has no test task to score: none of {test.unscored.height} tasks held out "
            f"for it ({parts.text()}) has the default and two forced configs measured; rows in no "
            f"task: {cells.left_out_text(left_out)}"
        )
    training, validation, whole = (
        cells.task_grid(frame, catalogue, part)
        for part in ([Split.TRAIN], [Split.VALIDATION], [*Split])
    )
    choices, probes, drawn = {}, {}, {}
    players = make_policies(training, validation, catalogue, learned)
    for done, player in enumerate(players):
        progress(done, len(players))
        choices[player.name] = player.choose(test)
        if player.probes is None:
            drawn[player.name] = player.choose(whole)
        else:
            probes[player.name] = player.probes
    noise = cells.noise_bands(cells.quiet(frame))
    results = result_rows(test, catalogue, choices, noise, probes)
    shown = result_rows(whole, catalogue, drawn, noise)
    free = [LearnedPolicy(policy, catalogue, name) for name, policy in learned]
    logged = logged_values(frame, catalogue, test, free)
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    systems, figures = {}, {}
    for system in test.tasks["system"].unique().sort():
        mine, known = results.filter(system=system), noise.filter(system=system)
        scores = _scores(mine, test, choices)
        for name in names:
            facts[name].append(facts_of(mine.filter(policy=name)))
        systems[system] = {
            "simulated": bool(mine["simulated"].all()),
            "noise_bands": dict(known.select("collective", "noise_band").sort("collective").rows()),
            "tasks_unscored": test.unscored.filter(system=system).height,
            **scores,
            "sentences": {name: say("report", "sentence", facts[name][-1]) for name in names},
            "verdicts": [
                line
                for name, policy in learned
                for line in (
                    verdict_of(name, scores["policies"], names),
                    channels_unread(policy.manifest, system),
                )
                if line
            ],
            "logged": logged.get(system, {}),
        }
        best = simple_tables(scores["policies"], names)[0]["policy"]
        ours = shown.filter(system=system)
        figures[system] = {"map": draw_map(ours, names), "gains": draw_gains(ours, names, best)}
    told = {
        "headline": say("report", "headline", facts),
        "systems": systems,
        "rows_left_out": left_out,
        "fitted_without_test": [n for n, policy in learned if policy.manifest.saw_test],
        "results": str(out / "results.parquet"),
        "page": str(out / "report.html"),
    }
    reasons = test.unscored.group_by("system", "unscored", "collective", maintain_order=True)
    header = {
        **told,
        "names": names,
        "drawn": figures,
        "changes": [
            changes_of(shown.filter(system=system), names[0], other)
            for other in names[1:]
            for system in systems
        ],
        "unscored": reasons.len().rows(),
        "confidence": CONFIDENCE,
        "folders": dict(policies),
        "run_ids": runs or {},
        **_sources(data_dir, everything),
        "manifests": {name: policy.manifest for name, policy in learned},
    }
    shutil.rmtree(out / FIGURES_FOLDER, ignore_errors=True)  # those of an earlier report
    _write(out, header, told)
    results.write_parquet(out / "results.parquet")
    with tempfile.TemporaryDirectory() as scratch:
        _write(Path(scratch), header, told)
        for run_id in header["run_ids"].values():
            run = tracking.reopen_run(tracking_uri(), run_id)
            run.log_folder(Path(scratch), f"report/{header['data_hash'][:12]}")
    return told


def _write(folder: Path, header: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(render("report.html", header), encoding="utf-8")
    (folder / SUMMARY_NAME).write_text(json.dumps(told, indent=1), encoding="utf-8")
    for system, found in header["drawn"].items():
        for kind, svg in found.items():
            path = folder / FIGURES_FOLDER / f"{slug(system)}-{kind}.svg"
            path.write_text(svg, encoding="utf-8")


def by_turn(policies: Sequence[NamedPolicy]) -> list[list[NamedPolicy]]:
    """Policies that held out other shapes, systems or runs apart; all as one if of other kinds."""
    turns: dict[Splits, list[NamedPolicy]] = {}
    for each in policies:
        turns.setdefault(each.manifest.parts, []).append(each)
    return [*turns.values()] if len({parts.by for parts in turns}) == 1 else [[*policies]]


def mean_over_turns(
    reports: Sequence[Mapping[str, Any]], recipes: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Mean and least time saved of turns and their systems (shares); of ours by recipe."""
    found: dict[str, list[float]] = {}
    for system in [each for report in reports for each in report["systems"].values()]:
        for name, each in system["policies"].items():
            found.setdefault(recipes.get(name, name), []).append(each["gain"])
    return {n: {"mean": sum(each) / len(each), "least": min(each)} for n, each in found.items()}


def _parts(learned: Mapping[str, Splits], frame: pl.DataFrame) -> Splits:
    for (first, found), (name, other) in pairwise(learned.items()):
        if other != found:
            raise UserError(
                f"{first} and {name} were trained on other parts of the data (split={found.by} and "
                f"split={other.by}), so that what is new to one is not to the other: report on "
                "them one by one"
            )
    return next(iter(learned.values()), None) or Splits.of(cells.tuned(cells.usable(frame)))


def _scores(
    mine: pl.DataFrame, grid: cells.TaskGrid, choices: Mapping[str, Actions]
) -> dict[str, dict[str, Any]]:
    """By policy: of all tasks, by collective, and where NCCL's own choice is not best."""
    own = mine.filter(pl.col("regret") > pl.col("noise_band"), policy="nccl-default")
    beyond = mine.join(own, on="task", how="semi", maintain_order="left")
    collectives = mine.group_by("collective", maintain_order=True)
    return {
        "policies": summarise(mine, grid, choices),
        "by_collective": {
            str(name): summarise(part, grid, choices) for (name,), part in collectives
        },
        # Elsewhere anything looks good. Empty where the band is not known.
        "beyond_noise": summarise(beyond, grid, choices) if beyond.height else {},
    }


def facts_of(mine: pl.DataFrame) -> dict[str, Any]:
    """Where a policy is faster, with no group shape slower, and where slower, beyond the noise."""
    # Slower: time / NCCL's own - 1 over the band. Faster: NCCL's own / time - 1 over it.
    least = pl.col("noise_band").fill_null(0.0)
    sizes = (
        mine.sort("collective", "size_bytes")
        .group_by("collective", "size_bytes", maintain_order=True)
        .agg(
            most=pl.col("gain").max(),
            lost=-pl.col("gain").min(),
            acts=(pl.col("chosen_config") != ABSTAIN.key).any(),
            saved=(1.0 - pl.col("oracle_us") / pl.col("default_us")).max(),
            least=least.first(),
            enough=(least / (1.0 + least)).first(),
        )
        .with_columns(slower=pl.col("acts") & (pl.col("lost") > pl.col("least")))
        .with_columns(
            faster=pl.col("acts") & (pl.col("most") > pl.col("enough")) & ~pl.col("slower")
        )
    )
    kept = sizes.filter(~pl.col("faster") & ~pl.col("slower"))
    possible = sizes.filter(pl.col("saved") > pl.col("enough")).sort("saved", descending=True)
    return {
        "gains": _ranges(sizes, "faster", "most"),
        "losses": _ranges(sizes, "slower", "lost"),
        "kept": kept.height > 0,
        "acts": bool(kept["acts"].any()),
        "possible": next(iter(possible.to_dicts()), None),
        "noise_known": mine["noise_band"].null_count() == 0,
    }


def _ranges(sizes: pl.DataFrame, flag: str, amount: str) -> list[dict[str, Any]]:
    found = []
    for (collective,), part in sizes.group_by("collective", maintain_order=True):
        runs = groupby(part.select("size_bytes", flag).rows(), key=lambda row: row[1])
        ranges = [[size for size, _ in run] for is_one, run in runs if is_one]
        if ranges:
            count = {"count": sum(map(len, ranges)), "of": part.height}
            ends = [(run[0], run[-1]) for run in ranges]
            most = part.filter(flag)[amount].max()
            found.append({"collective": collective, "ranges": ends, "most": most, **count})
    return found


def simple_tables(scores: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Baselines without more information than a policy (no search), the best first."""
    left_out = {*names, *SCALE}
    simple = [s for s in scores.values() if not s["probes"] and s["policy"] not in left_out]
    return sorted(simple, key=lambda each: -each["gain"])


def verdict_of(name: str, scores: Mapping[str, Any], names: Sequence[str]) -> str:
    """Is a policy worth more than the simple tables and regressions?"""
    mine, simple = scores[name], simple_tables(scores, names)
    gain, band = mine["gain"], mine["noise_band"]
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


def changes_of(drawn: pl.DataFrame, first: str, other: str) -> dict[str, Any]:
    """What would change on a system if `other` were promoted in place of `first`."""
    key = ["task", *TASK_COLUMNS, "split"]
    before = drawn.filter(policy=first).select(*key, before="chosen_config", us="chosen_us")
    after = drawn.filter(policy=other).select("task", after="chosen_config", then="chosen_us")
    both = before.join(after, on="task", maintain_order="left")
    changed = both.filter(pl.col("before") != pl.col("after"))
    tasks = changed.with_columns(saved=1.0 - pl.col("then") / pl.col("us"))
    system = drawn["system"][0]
    return {"system": system, "before": first, "after": other, "tasks": tasks.to_dicts()}


def _sources(data_dir: Path, frame: pl.DataFrame) -> dict[str, Any]:
    key = ["system", "sweep", "source"]
    day = pl.col("timestamp").dt.date()
    shape = pl.concat_str("num_nodes", pl.lit(" x "), "ranks_per_node")
    listed = {"shapes": shape, **{n: pl.col(n) for n in ("gpu", "nccl_version", "collective")}}
    found = frame.group_by(key).agg(
        rows=pl.len(),
        runs=pl.col("run").n_unique(),
        sizes=pl.col("size_bytes").n_unique(),
        first=day.min(),
        last=day.max(),
        **{name: each.drop_nulls().unique().sort() for name, each in listed.items()},
    )
    counts = cells.usable(frame).group_by(key).agg(timed=pl.len())
    found = found.join(counts, on=key, how="left").with_columns(pl.col("timed").fill_null(0))
    keys = ("tool", "dynamiccl_version", "python", "host", "git_commit", "files")
    writers = [{name: each.get(name) for name in keys} for each in provenance_of(data_dir)]
    return {
        "data": str(data_dir),
        "data_hash": content_hash(data_dir),
        "files": len(part_paths(data_dir)),
        "rows": frame.height,
        "runs": set(cells.run_names(cells.usable(frame))),
        "sources": found.sort(key).to_dicts(),
        "writers": [each for index, each in enumerate(writers) if each not in writers[:index]],
    }
