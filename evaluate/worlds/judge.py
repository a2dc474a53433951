"""Judges an entry's answers and three rivals' by the true times of frozen worlds."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from dynamiccl.errors import DynamicclError, UnknownName, UserError
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.answers import read_answers, write_answers
from dynamiccl.evaluate.worlds.draws import Draw
from dynamiccl.evaluate.worlds.entries import Entry, baseline
from dynamiccl.evaluate.worlds.frozen import DRAWS, VERSION, drifted
from dynamiccl.evaluate.worlds.kinds import WORLDS
from dynamiccl.evaluate.worlds.scores import FIGURES, judged, paired, summary

RIVALS: Final = ("nccl-default", "k-nearest", "interpolated")
RESULTS_NAME: Final = "benchmark.json"
HEADS: Final = (
    "world",
    "policy",
    "mean regret",
    "where NCCL loses over 1 %",
    "slower than NCCL by over 1 %",
    "gain kept",
    "draws",
    "tasks",
)
_ANSWERS_FOLDER: Final = "answers"
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Metrics by world and policy, over the draws that the entry answered."""

    entry: str
    #: World -> policy -> figures of scores.py; None where there is none.
    worlds: dict[str, dict[str, Figures]]
    #: World -> rival -> the entry's mean regret less the rival's; of two draws or more.
    paired: dict[str, dict[str, Figures]]
    #: What is not as it was frozen, in words.
    drift: list[str]
    #: What the entry did not answer, and why.
    errors: list[str]

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return {
            "version": VERSION,
            "is_frozen": not self.drift,
            "drift": self.drift,
            "entry": self.entry,
            "errors": self.errors,
            "worlds": self.worlds,
            "paired": self.paired,
        }

    def rows(self) -> list[list[str]]:
        """The metrics as text, in the order of HEADS."""
        return [
            [world, policy, *(_text(found, name) for name in FIGURES), *_counts(found)]
            for world, policies in self.worlds.items()
            for policy, found in policies.items()
        ]


def judge(
    entry: Entry,
    worlds: Sequence[str],
    draws: int,
    out: Path,
    *,
    resume: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Verdict:
    """Ask an entry about the first `draws` of some worlds, and write benchmark.json into `out`.

    `resume`: answers that are in `out` are not asked for again. An error of the entry is kept and
    costs that draw only; rivals are judged on the draws that it answered. Raises UnknownName for a
    world, and UserError for a number of draws, that the version does not hold.
    """
    for world in worlds:
        if world not in WORLDS:
            raise UnknownName("world", world, WORLDS)
    if not 1 <= draws <= DRAWS:
        raise UserError(f"--draws {draws}: {VERSION} has {DRAWS} of each world; take 1 to {DRAWS}")
    everyone = [entry, *(baseline(name) for name in RIVALS if name != entry.name)]
    rows: list[dict[str, Any]] = []
    drift: list[str] = []
    errors: list[str] = []
    for world in worlds:
        for number in range(draws):
            draw = Draw.open(world, number, out / VERSION)
            drift += drifted(draw)
            try:
                choices = {each.name: _answer(each, draw, out, resume) for each in everyone}
                rows += judged(choices, draw.truth, world, number)
            except DynamicclError as error:
                errors.append(f"{draw.name}: {error}")
            progress()
    verdict = _verdict(entry.name, pl.DataFrame(rows), drift, errors)
    (out / RESULTS_NAME).write_text(json.dumps(verdict.to_json(), indent=1), encoding="utf-8")
    return verdict


def _answer(entry: Entry, draw: Draw, out: Path, resume: bool) -> Actions:
    folder = out / _ANSWERS_FOLDER / entry.folder
    path = folder / f"{draw.name}.csv"
    if resume and path.is_file():
        return read_answers(path, draw)
    path.unlink(missing_ok=True)
    actions = entry.answer(draw, folder)
    write_answers(path, draw, actions)
    return actions


def _verdict(entry: str, rows: pl.DataFrame, drift: list[str], errors: list[str]) -> Verdict:
    worlds: dict[str, dict[str, Figures]] = {}
    against: dict[str, dict[str, Figures]] = {}
    if rows.is_empty():
        return Verdict(entry, worlds, against, drift, errors)
    for (world,), part in rows.group_by("setting", maintain_order=True):
        policies = part.partition_by("policy", as_dict=True, maintain_order=True)
        worlds[str(world)] = {
            str(policy): _plain(summary(found)) for (policy,), found in policies.items()
        }
        if part["draw"].n_unique() > 1:
            against[str(world)] = {
                rival: _plain(paired(part, entry, rival)) for rival in RIVALS if rival != entry
            }
    return Verdict(entry, worlds, against, drift, errors)


def _plain(found: dict[str, float]) -> Figures:
    return {name: None if math.isnan(value) else value for name, value in found.items()}


def _text(found: Figures, name: str) -> str:
    mean, low, high = (found[f"{name}{end}"] for end in ("", "_lo", "_hi"))
    if mean is None or low is None or high is None:
        return "-"
    return f"{mean:.1%} ({low:.1%} to {high:.1%})"


def _counts(found: Figures) -> list[str]:
    return [f"{found[name]:.0f}" for name in ("draws", "tasks")]
