"""The report: score policies on the test bins, write results.parquet, summary.json and a page."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import polars as pl

from dynamiccl.collect.describe import FAMILY_COLUMNS, MOST_FAMILIES, crossovers, draw_system
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import (
    NOISE_KEY,
    TaskGrid,
    comparable,
    left_out_text,
    noise_bands,
    quiet,
    rows_left_out,
    task_grid,
    tuned,
    usable,
)
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.schema import TASK_COLUMNS
from dynamiccl.datasets.splits import Split, Splits
from dynamiccl.datasets.store import content_hash, read, slug
from dynamiccl.errors import NotEnoughData, UserError
from dynamiccl.evaluate.baselines import make_policies
from dynamiccl.evaluate.blocks import FigureBlock, Section
from dynamiccl.evaluate.figures.changes import change_blocks
from dynamiccl.evaluate.figures.drawing import column_inches, svg_text
from dynamiccl.evaluate.gate.gated import read_gated
from dynamiccl.evaluate.gate.report_blocks import gate_blocks
from dynamiccl.evaluate.headline import first_sentence, table_verdict
from dynamiccl.evaluate.metrics import default_verdicts, result_rows, summarise
from dynamiccl.evaluate.named import NamedPolicy
from dynamiccl.evaluate.ope import logged_values
from dynamiccl.evaluate.origins import origin_section
from dynamiccl.evaluate.page import render
from dynamiccl.evaluate.policies import Actions, LearnedPolicy, Oracle, probes_of
from dynamiccl.evaluate.systems import Drawn, SystemReport, regret_section, system_section
from dynamiccl.evaluate.training import Training
from dynamiccl.train.policy import TorchPolicy

SUMMARY_NAME: Final = "summary.json"
NO_TRAININGS: Final[Mapping[str, Training]] = MappingProxyType({})
#: Every figure of the page as a file of its own, below the report.
FIGURES_FOLDER: Final = "figures"


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report: one entry a system, and where the files lie."""

    systems: list[SystemReport]
    results: Path
    page: Path
    #: Of the data that were scored; and rows of them that are in no task, by reason.
    data_hash: str
    left_out: dict[str, int]

    @property
    def files(self) -> list[Path]:
        """The page, its figures and the summary."""
        folder = self.page.parent
        return [self.page, folder / SUMMARY_NAME, folder / FIGURES_FOLDER]

    def to_json(self) -> dict[str, Any]:
        """Plain data: system -> policy -> figures."""
        return {
            "systems": {
                s.system: {
                    "simulated": s.simulated,
                    "noise_band": s.band,
                    "tasks_unscored": s.unscored.height,
                    "policies": {x.policy: x.to_json() for x in s.summaries},
                    "by_collective": {
                        c: {x.policy: x.to_json() for x in part}
                        for c, part in s.by_collective.items()
                    },
                    "beyond_noise": {x.policy: x.to_json() for x in s.beyond_noise},
                    "sentences": dict(s.sentences),
                    "verdicts": s.verdicts,
                    "logged": s.logged,
                }
                for s in self.systems
            },
            "rows_left_out": self.left_out,
            "results": str(self.results),
            "page": str(self.page),
        }


def make_report(
    data_dir: Path,
    policies: Sequence[tuple[str, Path]],
    out: Path,
    trainings: Mapping[str, Training] = NO_TRAININGS,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Score `policies` (name, policy directory) and the baselines on the test tasks of a data set.

    What is for test is what the policies were neither trained nor validated on; UserError where
    they differ in that.
    `trainings` are the runs, by name of a policy, whose curves are to be shown; `progress` is told
    of policies done, and of all.
    Raises what reading data and policies raises, and NotEnoughData when no task can be scored.
    """
    learned = [(name, TorchPolicy.load(path)) for name, path in policies]
    everything = read(data_dir)
    parts = _parts({name: policy.manifest.parts for name, policy in learned}, everything)
    frame = parts.assign(tuned(everything))
    catalogue, out_of_tasks = Catalogue.from_frame(usable(frame)), rows_left_out(everything)
    test = task_grid(frame, catalogue, [Split.TEST])
    if test.tasks.is_empty():
        raise NotEnoughData(
            f"{data_dir} has no test task to score: none of {test.unscored.height} tasks that are "
            f"held out for it ({parts.text()}) has the default and two forced configs measured; "
            f"rows in no task: {left_out_text(out_of_tasks)}"
        )
    training = task_grid(frame, catalogue, [Split.TRAIN])
    validation = task_grid(frame, catalogue, [Split.VALIDATION])
    players = make_policies(training, validation, catalogue, learned)
    choices, probes = {}, {}
    for done, player in enumerate(players):
        progress(done, len(players))
        choices[player.name] = player.choose(test)
        probes[player.name] = probes_of(player, test)
    bands = _bands(quiet(frame))
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.parquet"
    result_rows(test, catalogue, choices, bands).write_parquet(results)
    names = [name for name, _ in policies]
    free = [LearnedPolicy(policy, catalogue, name) for name, policy in learned]
    logged = logged_values(frame, catalogue, test, free)
    systems = [
        replace(
            _system_report(system, test, choices, probes, bands, names),
            logged=logged.get(system, {}),
            sentences={
                name: first_sentence(system, test, choices[name], choices["oracle"], bands)
                for name in names
            },
        )
        for system in test.tasks["system"].unique().sort()
    ]
    page = out / "report.html"
    whole = task_grid(frame, catalogue, list(Split))
    offline = [player for player in players if not probes[player.name].any()]
    drawn = {player.name: player.choose(whole) for player in offline if player.name != "oracle"}
    content = Drawn(
        grid=whole,
        choices=drawn,
        oracle=Oracle().choose(whole),
        defaults=default_names(frame, whole.tasks),
        catalogue=catalogue,
        learned=frozenset(names),
    )
    # What is fitted in one go has no steps.
    curves = [t.block(n) for n, t in trainings.items() if n in names and t.losses]
    sections = [
        *_maps(systems, names, everything),
        *_changes(systems, names, content),
        regret_section(systems, names),
        *(system_section(system, content) for system in systems),
        *([Section("How it was trained", curves, folded=True)] if curves else []),
        *_gate_section(policies),
        origin_section(data_dir, everything, {n: policy.manifest for n, policy in learned}),
    ]
    runs = {name: f"run {training.run_id}" for name, training in trainings.items()}
    told = {name: f", {p.manifest.slack.promise}" for name, p in learned if p.manifest.slack}
    header = {
        "data": str(data_dir),
        "data_hash": content_hash(data_dir),
        "policies": [
            (name, runs.get(name, str(path)) + told.get(name, "")) for name, path in policies
        ],
        "first": first_lines(systems, names),
    }
    text = render(sections, header)
    page.write_text(text, encoding="utf-8")
    _write_figures(sections, out / FIGURES_FOLDER)
    report = Report(systems, results, page, str(header["data_hash"]), out_of_tasks)
    (out / SUMMARY_NAME).write_text(json.dumps(report.to_json(), indent=1), encoding="utf-8")
    return report


def by_turn(policies: Sequence[NamedPolicy]) -> list[list[NamedPolicy]]:
    """Policies that held out other shapes, systems or runs apart; all as one if of other kinds."""
    turns: dict[Splits, list[NamedPolicy]] = {}
    for each in policies:
        turns.setdefault(Manifest.read(each.folder).parts, []).append(each)
    return [*turns.values()] if len({parts.by for parts in turns}) == 1 else [[*policies]]


def mean_over_turns(
    reports: Sequence[Report], policies: Sequence[NamedPolicy]
) -> dict[str, dict[str, float]]:
    """Mean and largest of the mean regrets of turns and their systems; of ours by recipe."""
    recipes = {each.name: Manifest.read(each.folder).recipe for each in policies}
    found: dict[str, list[float]] = {}
    for system in [system for report in reports for system in report.systems]:
        for each in system.summaries:
            found.setdefault(recipes.get(each.policy, each.policy), []).append(each.mean)
    return {name: {"mean": float(np.mean(each)), "most": max(each)} for name, each in found.items()}


def _parts(learned: Mapping[str, Splits], frame: pl.DataFrame) -> Splits:
    """How the data are split: as the policies had them."""
    if not learned:
        return Splits.of(tuned(usable(frame)))
    (first, found), *others = learned.items()
    for name, other in others:
        if other != found:
            raise UserError(
                f"{first} and {name} were trained on other parts of the data (split={found.by} and "
                f"split={other.by}), so that what is new to one is not to the other: report on "
                "them one by one"
            )
    return found


def first_lines(systems: Sequence[SystemReport], names: Sequence[str]) -> list[dict[str, Any]]:
    """What each policy gains on each system, for the top of the page and for a terminal."""
    return [
        {
            "system": each.system,
            "simulated": each.simulated,
            "band": "unknown" if each.band is None else f"{each.band:.2%}",
            "sentences": [(name, each.sentences[name]) for name in names],
        }
        for each in systems
    ]


def _maps(
    systems: Sequence[SystemReport], names: Sequence[str], frame: pl.DataFrame
) -> list[Section]:
    """For each system: the best measured configs, and each policy beside the simple tables."""
    found = crossovers(frame)
    sections = []
    for each in systems:
        drawn = best_config_map(each.system, found)
        lines = [table_verdict(name, each.summaries, names, each.band) for name in names]
        blocks = [] if drawn is None else [drawn]
        sections.append(Section(each.system, blocks, simulated=each.simulated, verdicts=lines))
    return sections


def default_names(frame: pl.DataFrame, tasks: pl.DataFrame) -> list[str | None]:
    """(T,) algorithm/protocol of NCCL's default on each task of a grid; None where unknown.

    Unknown is also what differed between runs, or was read back in some alone.
    """
    rows = comparable(quiet(tuned(frame))).filter("is_default")
    name = pl.concat_str("actual_algorithm", "actual_protocol", separator="/")
    chosen = rows.group_by(TASK_COLUMNS).agg(name=name.unique())
    one = pl.when(pl.col("name").list.len() == 1).then(pl.col("name").list.first())
    found = tasks.select(TASK_COLUMNS).join(
        chosen.with_columns(one.alias("name")),
        on=TASK_COLUMNS,
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    return found["name"].to_list()


def best_config_map(system: str, found: pl.DataFrame) -> FigureBlock | None:
    """The map of one system from `crossovers` of a data set; None when it has no quiet task."""
    part = found.filter(pl.col("system") == system)
    if part.is_empty():
        return None
    families = part.select(FAMILY_COLUMNS).n_unique()
    inches = column_inches(part["size_bytes"].n_unique())
    svg = svg_text(draw_system("", part, inches))
    note = (
        "All measured sizes. The fastest measured config, grey where NCCL's own choice is as fast "
        "within the noise; the number is its gain over NCCL's own choice, default / best - 1, in "
        "%, missing where NCCL's own choice was not measured."
    )
    if families > MOST_FAMILIES:
        note += f" The first {MOST_FAMILIES} of {families} rows."
    title = "Best measured config by size, and its gain"
    return FigureBlock(title, f"{slug(system)}-map", svg, note)


def _changes(systems: Sequence[SystemReport], names: Sequence[str], drawn: Drawn) -> list[Section]:
    """What would change if another policy than the first were promoted; none of one policy."""
    sections = []
    for first, name in ((names[0], other) for other in names[1:]):
        before, after = (first, drawn.choices[first]), (name, drawn.choices[name])
        parts = [
            change_blocks(each.system, drawn.grid, drawn.catalogue, before, after)
            for each in systems
        ]
        same = [each.system for each, part in zip(systems, parts, strict=True) if not part]
        text = f"Where {name} would choose otherwise than {first}, at all measured sizes."
        text += f" Nothing changes on {', '.join(same)}." if same else ""
        maps = [part[0] for part in parts if part]
        tables = [part[1] for part in parts if part]
        title = f"What changes if {name} is promoted"
        sections.append(Section(title, maps, text=text, details=tables))
    return sections


def _gate_section(policies: Sequence[tuple[str, Path]]) -> list[Section]:
    """The decisions of the gates that policies went through; none without one."""
    found = [(name, read_gated(path)) for name, path in policies]
    blocks = [block for name, gated in found if gated for block in gate_blocks(name, gated)]
    text = "A policy that went through a gate is scored as its tables act: with what passed alone."
    title = "What the gate let through"
    return [Section(title, blocks, text=text, folded=True)] if blocks else []


def _write_figures(sections: Sequence[Section], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # those of an earlier report
    folder.mkdir()
    for section in sections:
        for block in [*section.blocks, *section.details]:
            if isinstance(block, FigureBlock):
                (folder / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")


def _bands(frame: pl.DataFrame) -> dict[tuple[str, str | None], float]:
    """Noise bands by (system, collective), and by (system, None) for all collectives."""
    whole = noise_bands(frame).select("system", pl.lit(None, pl.String), "noise_band")
    parts = noise_bands(frame, NOISE_KEY).select(*NOISE_KEY, "noise_band")
    return {(s, c): band for table in (whole, parts) for s, c, band in table.iter_rows()}


def _system_report(
    system: str,
    grid: TaskGrid,
    choices: dict[str, Actions],
    probes: dict[str, Actions],
    bands: Mapping[tuple[str, str | None], float],
    learned: Sequence[str],
) -> SystemReport:
    band = bands.get((system, None))
    tasks = grid.tasks.with_row_index("row").filter(pl.col("system") == system)
    rows = tasks["row"].to_numpy().astype(np.int64)
    summaries = summarise(grid, rows, choices, band, probes)
    by_collective = {
        str(key[0]): summarise(grid, part["row"].to_numpy().astype(np.int64), choices, band, probes)
        for key, part in tasks.group_by("collective", maintain_order=True)
    }
    # One line a collective: all-gather may tie where all-reduce gains, and a mean would hide both.
    against_default = [
        line
        for name, part in by_collective.items()
        for line in default_verdicts(f"{system} {name}", part, learned, bands.get((system, name)))
    ]
    default_regret = grid.regret(choices["nccl-default"])
    beyond = rows[default_regret[rows] > band] if band is not None else rows[:0]
    return SystemReport(
        system=system,
        simulated=bool(tasks["simulated"].all()),
        band=band,
        summaries=summaries,
        by_collective=by_collective,
        beyond_noise=summarise(grid, beyond, choices, band, probes) if len(beyond) else [],
        verdicts=[*against_default, *(table_verdict(n, summaries, learned, band) for n in learned)],
        unscored=grid.unscored.filter(pl.col("system") == system),
    )
