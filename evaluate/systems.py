"""Report sections of one system: tables, regret by size, and figures of its families."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
from matplotlib.figure import Figure

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import slug
from dynamiccl.evaluate.baselines import FAMILY, rows_by_family
from dynamiccl.evaluate.blocks import Block, FigureBlock, Section, TableBlock
from dynamiccl.evaluate.figures.drawing import family_title, line_style, order_by_size, svg_text
from dynamiccl.evaluate.figures.families import crossover_map, curves, heat_map
from dynamiccl.evaluate.metrics import Summary, simple_baselines
from dynamiccl.evaluate.ope import CONFIDENCE
from dynamiccl.evaluate.page import HEADS, cells, crossfit_text
from dynamiccl.evaluate.policies import Actions
from dynamiccl.sizes import BINS_PER_OCTAVE, size_label

#: A family is drawn when it has so many sizes; at most so many families a system.
_MIN_SIZES: Final = 4
_MAX_FAMILIES: Final = 8
#: What the columns of the tables of regret mean.
READING: Final = (
    "Regret is time over the best measured config, minus one. Cross-fitted, that config is chosen "
    "on one half of the runs and all are timed on the other, so that luck counts for nobody (it "
    "can come out negative); a dash: too few independent runs, so the best config is one of noisy "
    "single figures (optimistic oracle, no interval). Ratio is the geometric mean of time over "
    "NCCL's own choice. Nine in ten configs repeat within the noise band."
)


@dataclass(frozen=True, slots=True)
class SystemReport:
    """All results on one system."""

    system: str
    simulated: bool
    band: float | None
    summaries: list[Summary]
    by_collective: dict[str, list[Summary]]
    #: The tasks on which the default's own regret exceeds the noise band; elsewhere anything looks
    #: good. Empty when there are none, or the band is not known.
    beyond_noise: list[Summary]
    verdicts: list[str]
    unscored: pl.DataFrame
    #: Off-policy estimates of the policies, where a sweep drew what it measured.
    logged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: What each policy gains, by its name (`headline.first_sentence`).
    sentences: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The data of the figures of all systems."""

    #: Tasks of all splits.
    grid: TaskGrid
    #: What each policy that tries nothing chose on them, ours first.
    choices: Mapping[str, Actions]
    #: (T,) the fastest measured config.
    oracle: Actions
    #: (T,) what NCCL chose by itself, where the data say so.
    defaults: Sequence[str | None]
    catalogue: Catalogue
    #: The policies that the report is about.
    learned: frozenset[str]


def regret_section(systems: Sequence[SystemReport], learned: Sequence[str]) -> Section:
    """Mean regret of policies, default and best simple baseline on each system."""
    heads = [
        "system", "policy", "cross-fitted regret, 95 % interval", "NCCL's default",
        "best simple baseline", "mean regret", "default's", "ratio to default", "noise band",
    ]  # fmt: skip
    rows = []
    for system in systems:
        by_name = {summary.policy: summary for summary in system.summaries}
        default = by_name["nccl-default"]
        simple = simple_baselines(system.summaries, learned)
        best = min(simple, key=lambda each: each.mean)
        for name in learned:
            ours = by_name[name]
            rows.append(
                [
                    system.system + (" (simulated)" if system.simulated else ""),
                    name,
                    crossfit_text(ours),
                    crossfit_text(default),
                    f"{best.policy}: {crossfit_text(best)}",
                    f"{ours.mean:.2%}",
                    f"{default.mean:.2%}",
                    f"{ours.ratio_to_default:.4f}",
                    "unknown" if system.band is None else f"{system.band:.2%}",
                ]
            )
    note = (
        "Test size bins. The best simple baseline is that of the least mean regret there, which "
        "flatters it; the search and the oracle are left out. " + READING
    )
    table = TableBlock("Mean regret by system", heads, rows, note)
    return Section("Regret on all systems", [table], folded=True)


def system_section(system: SystemReport, drawn: Drawn) -> Section:
    """All results of one system."""
    figures, not_drawn = _figures(system.system, drawn)
    scored = system.summaries[0]
    band = "unknown (no repeats)" if system.band is None else f"{system.band:.2%}"
    text = (
        f"Noise band {band}; {system.unscored.height} test tasks listed and not scored; "
        f"{scored.tasks} scored, {scored.tasks - scored.tasks_with_interval} of them in no interval"
        " (an optimistic oracle: no independent repeats; or the very times of another task)."
    )
    if not_drawn:
        text += f" {not_drawn} more families with fewer sizes are in results.parquet only."
    return Section(
        f"{system.system}: all figures",
        [
            *_tables(system, drawn.learned),
            *([logged_table(system.logged)] if system.logged else []),
            _by_size(system, drawn),
        ],
        simulated=system.simulated,
        text=text,
        verdicts=system.verdicts,
        details=[*figures, *_listed(system)],
        folded=True,
    )


def _tables(system: SystemReport, learned: frozenset[str]) -> Iterator[TableBlock]:
    def table(title: str, summaries: Sequence[Summary]) -> TableBlock:
        return TableBlock(
            title, HEADS, [cells(s) for s in summaries], ours=learned, layout="scores"
        )

    yield table("All collectives", system.summaries)
    if system.beyond_noise:
        count = system.beyond_noise[0].tasks
        title = f"Where NCCL's default itself is beyond the noise band: {count} of the tasks"
        yield table(title, system.beyond_noise)
    if len(system.by_collective) > 1:
        for name, part in system.by_collective.items():
            yield table(name, part)


def logged_table(found: Mapping[str, Mapping[str, Any]]) -> TableBlock:
    """Off-policy estimates (`ope.logged_values` of a system)."""
    heads = ["policy", "tasks where it acts", "draws there", "DM", "SNIPS", "DR"]
    note = (
        "Mean time over NCCL's default, on the tasks where a policy acts, free to take any config "
        "that this sweep may draw: estimated from the configs that it drew and from their "
        f"probabilities, with {CONFIDENCE:.0%} intervals (DM has none, and a sweep that follows "
        "what it sees gives none). The tables above let it choose among what was drawn for a task."
    )
    rows = [
        [
            name,
            f"{each['acts']} of {each['tasks']}",
            str(each["draws"]),
            *(_estimate_text(each.get(estimator)) for estimator in heads[3:]),
        ]
        for name, each in found.items()
    ]
    return TableBlock("Estimated from what the sweep drew", heads, rows, note, layout="numbers")


def _estimate_text(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    if found["mean"] is None:
        return str(found["note"])
    interval = "" if found["low"] is None else f" ({found['low']:.4f} to {found['high']:.4f})"
    return f"{found['mean']:.4f}{interval}"


def _by_size(system: SystemReport, drawn: Drawn) -> FigureBlock:
    is_mine = (drawn.grid.tasks["system"] == system.system).to_numpy()
    by_octave = regret_by_octave(drawn.grid, np.flatnonzero(is_mine), drawn.choices)
    tested = drawn.grid.tasks.filter(pl.Series(is_mine), split=Split.TEST.value)
    return FigureBlock(
        "Regret by message size",
        f"{slug(system.system)}-by-size",
        regret_by_size(by_octave, system.band, set(tested["bin"] // BINS_PER_OCTAVE)),
        "Regret against the best measured config, the mean over all families that have sizes in "
        "the octave. An asterisk marks octaves with test tasks; at the others the policies were "
        "trained or tuned. Below the hatched line differences may be noise.",
    )


def _listed(system: SystemReport) -> list[TableBlock]:
    if not system.unscored.height:
        return []
    counted = system.unscored.group_by("unscored", "collective", maintain_order=True).len()
    rows = [[str(cell) for cell in row] for row in counted.iter_rows()]
    title = f"Tasks that are listed and not scored ({system.unscored.height})"
    return [TableBlock(title, ["reason", "collective", "tasks"], rows)]


def _figures(system: str, drawn: Drawn) -> tuple[list[Block], int]:
    mine = drawn.grid.tasks.with_row_index("row").filter(pl.col("system") == system)
    families = [part for _, part in mine.group_by(FAMILY, maintain_order=True)]
    wide = sorted((f for f in families if f.height >= _MIN_SIZES), key=lambda f: -f.height)
    ends = {"nccl-default": drawn.choices["nccl-default"]}
    ours = {name: actions for name, actions in drawn.choices.items() if name in drawn.learned}
    strips = {**ends, **ours, "oracle": drawn.oracle}
    figures: list[Block] = []
    for number, part in enumerate(wide[:_MAX_FAMILIES], start=1):
        rows = order_by_size(drawn.grid.tasks, part["row"].to_list())
        title, name = family_title(part.row(0, named=True)), f"{slug(system)}-{number}"
        figures += [
            FigureBlock(
                title,
                f"{name}-configs",
                heat_map(drawn.grid, rows, drawn.catalogue),
                "Time over the best measured config of each size, as figures; a dot marks the "
                "best, grey was not measured, an asterisk marks what is for test (the others "
                "were seen in training or validation).",
            ),
            FigureBlock(
                f"{title}: policies",
                f"{name}-policies",
                curves(drawn.grid, rows, drawn.choices),
                "Time over the best measured config by message size, a line and a marker each "
                "policy; 1 is the best.",
            ),
            FigureBlock(
                f"{title}: crossovers",
                f"{name}-crossovers",
                crossover_map(drawn.grid, rows, drawn.catalogue, strips, drawn.defaults),
                "What is chosen at which size: a letter and a hatch each config, in brackets "
                "where the choice is NCCL's own. An asterisk marks what is for test.",
            ),
        ]
    return figures, len(families) - len(wide[:_MAX_FAMILIES])


def regret_by_octave(
    grid: TaskGrid, rows: npt.NDArray[np.int64], choices: Mapping[str, Actions]
) -> dict[int, dict[str, float]]:
    """Octave of the size (its exponent) -> policy -> regret (a fraction) over the tasks `rows`.

    The mean over families of each family's mean: one that was swept finely weighs no more.
    """
    octaves = grid.tasks["bin"].to_numpy() // BINS_PER_OCTAVE
    families = [found[np.isin(found, rows)] for found in rows_by_family(grid.tasks).values()]
    regrets = {name: grid.regret(actions) for name, actions in choices.items()}
    by_octave = {}
    for octave in np.unique(octaves[rows]).tolist():
        parts = [part for f in families if len(part := f[octaves[f] == octave])]
        by_octave[octave] = {
            name: float(np.mean([regret[part].mean() for part in parts]))
            for name, regret in regrets.items()
        }
    return by_octave


def regret_by_size(
    by_octave: Mapping[int, Mapping[str, float]], band: float | None, tested: Collection[int]
) -> str:
    """One line a policy, the noise band as a hatched strip, an asterisk for `tested` octaves."""
    octaves = sorted(by_octave)
    figure = Figure(figsize=(8.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(next(iter(by_octave.values()))):
        percent = [100 * by_octave[octave][name] for octave in octaves]
        axes.plot(range(len(octaves)), percent, label=name, **line_style(index))
    if band is not None:
        axes.axhspan(
            0.0,
            100 * band,
            facecolor="#88888833",
            edgecolor="#999999",
            hatch="///",
            linewidth=0,
            zorder=0,
            label=f"noise band ({band:.1%})",
        )
    labels = [size_label(1 << each) + (" *" if each in tested else "") for each in octaves]
    axes.set_xticks(range(len(octaves)), labels, rotation=90, fontsize=8)
    axes.set_xlabel("message size, by octave")
    axes.set_ylabel("mean regret (%)")
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return svg_text(figure)
