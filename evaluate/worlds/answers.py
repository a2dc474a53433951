"""Answers of an entry as a CSV file: `task,algorithm,protocol,channels`.

Empty knobs leave the choice to NCCL, all three or the channels alone. There is one row for each
task, and a choice must be open for it (the column `choices` of the questions).
"""

import csv
from pathlib import Path
from typing import Final

import numpy as np

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.errors import CorruptFile, MissingPath, NotEnoughData, UnknownName
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.draws import Draw, choice_text

COLUMNS: Final = ("task", "algorithm", "protocol", "channels")


def write_answers(path: Path, draw: Draw, actions: Actions) -> None:
    """Write (T,) actions as answers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    with hidden.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for task, action in zip(draw.tasks, actions, strict=True):
            knobs = choice_text(draw.catalogue.configs[action]).split("/")
            writer.writerow([task, *knobs, *[""] * (len(COLUMNS) - 1 - len(knobs))])
    hidden.replace(path)


def read_answers(path: Path, draw: Draw) -> Actions:
    """(T,) the actions that a file of answers names.

    Raises MissingPath, CorruptFile (no such table), UnknownName (a task that was not asked, a
    choice that is not open) and NotEnoughData (a task without an answer, or with two).
    """
    if not path.is_file():
        raise MissingPath("answers", path, f"write it with the columns {','.join(COLUMNS)}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows, heads = list(reader), reader.fieldnames or ()
    except (UnicodeDecodeError, csv.Error) as error:
        raise CorruptFile(f"{path} is no CSV file: {error}") from error
    if missing := [name for name in COLUMNS if name not in heads]:
        raise CorruptFile(
            f"{path} has no column {', '.join(missing)}; write the columns {','.join(COLUMNS)}"
        )
    places, choices = {task: place for place, task in enumerate(draw.tasks)}, draw.choices
    found: dict[int, int] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}, row {number}"
        task = row["task"]
        if task not in places:
            few = [*draw.tasks[:3], f"... ({len(places)} tasks of the questions)"]
            raise UnknownName("task", task, few, where=where)
        place = places[task]
        if place in found:
            raise NotEnoughData(f"{where}: task {task} is answered twice; answer each once")
        found[place] = _action(row, choices[place], where)
    if lacking := [task for task, place in places.items() if place not in found]:
        raise NotEnoughData(
            f"{path} answers {len(found)} of {len(places)} tasks; {lacking[0]} has no row; for "
            "NCCL's own choice write one with the other columns empty"
        )
    return np.array([found[place] for place in range(len(places))], dtype=np.int64)


def _action(row: dict[str, str | None], choices: dict[str, int], where: str) -> int:
    knobs = [(row[name] or "").strip() for name in COLUMNS[1:]]
    named = "/".join(knobs).rstrip("/")
    if not named:
        return ABSTAIN_ACTION
    if named not in choices:
        kind = f"choice of task {row['task']}"
        raise UnknownName(kind, named, [*choices, "'' (NCCL's own)"], where=where)
    return choices[named]
